"""From the numbers of a step to what is wrong with it."""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from instruments.errors import ConfigError, some
from instruments.gradients import in_backward
from instruments.precision.calls import find_tensors
from instruments.training_watch.step_log import NOTE, SEVERE, WARNING, Anomaly, StepReport, WatchConfig

MISSING = -1.0  # the norm of a gradient that is not there
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "module.")


@torch.no_grad()
def gradient_norms(parameters: Sequence[nn.Parameter]) -> Float[Tensor, "P"]:
    """L2 norm of each parameter's gradient, `MISSING` where there is none, on the first parameter's device.

    Nothing waits for the device. Shards of a DTensor are added up over the processes that hold them; all of them have
    to call. Numerics: fp32 sums of squares, which overflow for finite gradients above 1e19.
    """
    device = parameters[0].device
    norms_P = torch.full((len(parameters),), MISSING, device=device)
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = defaultdict(list)
    for place, parameter in enumerate(parameters):
        if parameter.grad is not None:
            values = _local(parameter.grad)
            groups[values.device, values.dtype].append((place, values))
    for group in groups.values():
        found = torch._foreach_norm([values for _place, values in group], 2, dtype=torch.float32)
        norms_P[[place for place, _values in group]] = torch.stack(found).to(device)
    return _add_shards(parameters, norms_P)


def _local(grad: Tensor) -> Tensor:
    values = grad.to_local() if isinstance(grad, DTensor) else grad
    # Rows that occur several times count as their sum.
    return values.coalesce().values() if values.is_sparse else values


def _add_shards(parameters: Sequence[nn.Parameter], norms_P: Tensor) -> Tensor:
    meshes = defaultdict(list)
    for place, parameter in enumerate(parameters):
        if isinstance(parameter, DTensor) and any(part.is_shard() for part in parameter.placements):
            for number, part in enumerate(parameter.placements):
                if part.is_shard():
                    meshes[parameter.device_mesh, number].append(place)
    for (mesh, number), places in meshes.items():
        mine = norms_P[places]
        squares = torch.stack([mine.clamp_min(0).square(), (mine != MISSING).float()])
        torch.distributed.all_reduce(squares, group=mesh.get_group(number))
        norms_P[places] = torch.where(squares[1] > 0, squares[0].sqrt(), MISSING)
    return norms_P


def refuse_flat_shards(model: nn.Module) -> None:
    """Raises ConfigError: FSDP's first generation flattens parameters; layers have no gradients of their own."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ConfigError(
            "the model is sharded by FullyShardedDataParallel, whose flat parameters hide the layers",
            where="watch_model",
            do="shard with torch.distributed.fsdp.fully_shard, or watch the model without sharding",
        )


def layer_of(name: str) -> str:
    """The module that owns a parameter, without the names that wrappers put before it."""
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper) if wrapper == "module." else name.replace(wrapper, "")
    return name.rpartition(".")[0] or name


@dataclass(frozen=True, eq=False)
class Peak:
    """Of one output; NaN where it holds any."""

    module: str
    dtype: torch.dtype
    value: Tensor


class OutputWatch:
    """Hooks on the modules that have no others inside."""

    def __init__(self, model: nn.Module) -> None:
        """Put them there."""
        self.peaks: list[Peak] = []  # since the last `take`
        self.handles: list[RemovableHandle] = [
            module.register_forward_hook(self._hook(name)) for name, module in find_leaves(model)
        ]

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(_module: nn.Module, _inputs: Any, output: Any) -> None:  # noqa: ANN401 - any output of a module
            # Not held-out text, nor what is computed once more in the backward pass.
            if torch.is_grad_enabled() and not in_backward():
                for tensor in _tensors(output):
                    value = largest(tensor)
                    self.peaks.append(Peak(name, tensor.dtype, value))

        return look

    def take(self) -> list[Peak]:
        """What was seen; the next step starts with nothing."""
        peaks, self.peaks = self.peaks, []
        return peaks

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self.handles:
            handle.remove()


def find_leaves(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules without modules of their own; the model itself where it has none."""
    for name, module in model.named_modules():
        if next(module.children(), None) is None:
            yield layer_of(f"{name}.") if name else type(module).__name__, module


def largest(tensor: Tensor) -> Tensor:
    """Of absolute values, in one pass that copies nothing; NaN where there is any."""
    low, high = torch.aminmax(tensor.detach())
    return torch.maximum(-low, high).float()


def _tensors(output: Any) -> Iterator[Tensor]:  # noqa: ANN401
    parts = [output] if isinstance(output, Tensor) else find_tensors(output).values()
    for part in parts:
        if part.is_floating_point() and part.numel() and not part.is_sparse:
            yield part


@dataclass(frozen=True)
class Output:
    """Of a module: the largest absolute value, in which format."""

    module: str
    dtype: torch.dtype
    value: float


@dataclass(frozen=True)
class Numbers:
    """Of one step, on the host."""

    loss: float | None
    layers: Mapping[str, float]  # gradient norms in the order modules run
    not_finite: Sequence[str]  # layers whose gradient holds NaN or inf, in that order
    outputs: Sequence[Output]  # in the order they were computed
    scaled: bool  # a GradScaler skips steps that are not finite


def judge(numbers: Numbers, config: WatchConfig) -> list[Anomaly]:
    """Everything that is wrong; gradients that are not finite have no norms to judge."""
    lost = judge_finiteness(numbers)
    norms = [] if numbers.not_finite else judge_norms(numbers.layers, config)
    return [*lost, *norms, *judge_range(numbers.outputs, config)]


def judge_finiteness(numbers: Numbers) -> list[Anomaly]:
    """NaN and inf, with the place where they come from."""
    outputs = numbers.outputs
    bad = next((place for place, output in enumerate(outputs) if not math.isfinite(output.value)), None)
    backwards = list(reversed(numbers.not_finite))
    if bad is not None:
        first, before = outputs[bad], outputs[bad - 1].module if bad else "the model's input"
        what = f"{_word(first.value)} first in the output of {first.module} ({_name(first.dtype)})"
        return [Anomaly("not_finite", SEVERE, f"{what}; finite until {before}", (first.module, *backwards))]
    if numbers.loss is not None and not math.isfinite(numbers.loss):
        message = f"the loss is {numbers.loss:g}{_finite_outputs(outputs)}: compute it in float32, inside autocast"
        if backwards:
            message += f"; backwards, the first layer whose gradient is not finite is {backwards[0]}"
        return [Anomaly("not_finite", SEVERE, message, tuple(backwards))]
    if not backwards:
        return []
    what = f"backwards, the first gradient that is not finite is that of {backwards[0]}, of {len(backwards)} layers"
    if numbers.scaled:
        return [Anomaly("skipped", NOTE, f"{what}; the step is skipped and the loss scale falls", tuple(backwards))]
    return [Anomaly("not_finite", SEVERE, f"{what}{_finite_outputs(outputs)}", tuple(backwards))]


def judge_norms(layers: Mapping[str, float], config: WatchConfig) -> list[Anomaly]:
    """Gradients that vanish or explode, and layers that get none while the others do."""
    if not layers:
        return []
    total, typical = math.hypot(*layers.values()), median(layers.values())
    found = []
    dead = [name for name, norm in layers.items() if norm <= config.dead * typical] if 0 < typical < math.inf else []
    low = [name for name, norm in layers.items() if norm < config.vanishing and name not in dead]
    high = sorted((name for name in layers if layers[name] > config.exploding), key=lambda name: -layers[name])
    if dead:
        share = f"at most {config.dead:g} of the median layer's {typical:.2g}"
        what = f"no gradient to speak of in {some(dead, 3, ', ')}: {share}"
        found.append(Anomaly("dead_layer", WARNING, what, tuple(dead)))
    if total < config.vanishing:
        what = f"the gradient vanishes: its norm is {total:.2g}, below {config.vanishing:g}"
        found.append(Anomaly("vanishing", SEVERE, what))
    elif low:
        what = f"gradient norms below {config.vanishing:g}: {_with_norms(low, layers)}"
        found.append(Anomaly("vanishing", WARNING, what, tuple(low)))
    if total > config.exploding:
        what = f"the gradient explodes: its norm is {total:.3g}, above {config.exploding:g}"
        worst = max(layers, key=lambda name: layers[name])
        what += f"; largest: {_with_norms(high or [worst], layers)}"
        found.append(Anomaly("exploding", WARNING, what, tuple(high or [worst])))
    return found


def judge_range(outputs: Sequence[Output], config: WatchConfig) -> list[Anomaly]:
    """Outputs next to the largest number of their format."""
    shares: dict[str, float] = {}
    for output in outputs:
        share = output.value / torch.finfo(output.dtype).max
        if math.isfinite(share) and share > max(config.near_limit, shares.get(output.module, 0)):
            shares[output.module] = share
    worst = sorted(shares, key=lambda name: -shares[name])
    if not worst:
        return []
    what = f"outputs up to {shares[worst[0]]:.0%} of the largest number of their format: {some(worst, 3, ', ')}"
    return [Anomaly("near_limit", WARNING, what, tuple(worst))]


def _finite_outputs(outputs: Sequence[Output]) -> str:
    if not outputs:
        return ""
    largest = max(outputs, key=lambda output: output.value)
    where = f"{largest.value:.3g} in {largest.module}, {_name(largest.dtype)}"
    return (
        f", while all outputs of the model are finite (largest {where}; last {outputs[-1].module}, "
        f"{_name(outputs[-1].dtype)})"
    )


def _with_norms(names: Sequence[str], layers: Mapping[str, float]) -> str:
    return some([f"{name} ({layers[name]:.2g})" for name in names], 3, ", ")


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "inf"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_loss_scale(
    scale: GradScaler | float, history: Sequence[float] = (), config: WatchConfig | None = None
) -> list[Anomaly]:
    """Judge a loss scale.

    Args:
        scale: a GradScaler, or the scale now; a scaler that is switched off has nothing to judge.
        history: scales of the steps before, the oldest first.
        config: thresholds; None takes the defaults.
    Returns:
        Nothing where all is well; below 128 a warning, at 1 severe, five falls in a row a warning.
    """
    config = config or WatchConfig()
    if not isinstance(scale, int | float):
        if not scale.is_enabled():
            return []
        scale = scale.get_scale()
    found = []
    if not scale > config.lost_scale:
        message = f"the loss scale is {scale:g}: overflows go on without any scaling, and float16 gradients underflow"
        found.append(Anomaly("loss_scale", SEVERE, message))
    elif scale < config.low_scale:
        message = f"the loss scale is {scale:g}, below {config.low_scale:g}: small gradients underflow in float16"
        found.append(Anomaly("loss_scale", WARNING, message))
    falls = count_falls([*history, scale])
    if falls >= config.falls:
        message = f"the loss scale fell {falls} steps in a row, to {scale:g}: something overflows at every scale"
        found.append(Anomaly("falling_scale", WARNING, message))
    return found


def count_falls(scales: Sequence[float]) -> int:
    """Falls in a row at the end, one step each."""
    falls = 0
    for before, after in zip(reversed(scales[:-1]), reversed(scales[1:]), strict=True):
        if not after < before:
            break
        falls += 1
    return falls


logger = logging.getLogger(__name__)


def find_trainable(model: nn.Module, optimizer: Optimizer | None) -> dict[str, nn.Parameter]:
    """Parameters that ask for a gradient, by name; with an optimizer, those it has."""
    own = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if optimizer is None:
        return own
    asked = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    strangers = len(asked - {id(parameter) for parameter in own.values()})
    if strangers:
        logger.warning("%d parameters of the optimizer are none that the model trains: not watched", strangers)
    return {name: parameter for name, parameter in own.items() if id(parameter) in asked}


class Measurement:
    """What is looked at, and the loss scales so far."""

    def __init__(self, model: nn.Module, trainable: dict[str, nn.Parameter], config: WatchConfig) -> None:
        """Put hooks on the modules where outputs are wanted."""
        refuse_flat_shards(model)
        self.config = config
        self.parameters = trainable
        self.device = next((p.device for p in [*trainable.values(), *model.parameters()]), torch.device("cpu"))
        self.outputs = OutputWatch(model) if config.activations else None
        self.scales: list[float] = []
        self._order: dict[str, int] = {}  # of modules, as they first ran

    def remove(self) -> None:
        """Take the hooks off."""
        if self.outputs is not None:
            self.outputs.remove()

    @torch.no_grad()
    def read(
        self, step: int, loss: Tensor | float | None, scaler: GradScaler | None, factor: Tensor | None
    ) -> StepReport:
        """The report of a step, whose gradients are to be multiplied by `factor`; one transfer from the device."""
        peaks = self.outputs.take() if self.outputs is not None else []
        norms_P = gradient_norms(list(self.parameters.values())) if self.parameters else torch.zeros(0)
        scale = scaler.scale(torch.ones((), device=self.device)) if scaler is not None else None
        singles = [torch.as_tensor(math.nan if one is None else one) for one in (loss, scale, factor)]
        parts = [norms_P, *singles, *(peak.value for peak in peaks)]
        numbers = torch.cat([part.detach().float().reshape(-1).to(self.device) for part in parts]).tolist()
        count = len(self.parameters)
        loss_value, scale_value, factor_value = numbers[count : count + 3]
        layers, lost = self._by_layer(numbers[:count], 1.0 if factor is None else factor_value, peaks)
        outputs = [Output(p.module, p.dtype, value) for p, value in zip(peaks, numbers[count + 3 :], strict=True)]
        known = None if loss is None else loss_value
        found = judge(Numbers(known, layers, lost, outputs, scaler is not None), self.config)
        if scaler is not None:
            found += check_loss_scale(scale_value, self.scales, self.config)
            self.scales = [*self.scales[-self.config.falls :], scale_value]
        largest = max(outputs, key=lambda output: (math.isnan(output.value), output.value), default=None)
        return StepReport(
            step, known, math.hypot(*layers.values()), None if scaler is None else scale_value, layers,
            None if largest is None else (largest.module, largest.value), tuple(found),
        )  # fmt: skip

    def _by_layer(self, norms: list[float], factor: float, peaks: list[Peak]) -> tuple[dict[str, float], list[str]]:
        """Norms of layers that have a gradient, in the order they run; and those that hold NaN or inf."""
        for peak in peaks if not self._order else []:
            self._order.setdefault(peak.module, len(self._order))
        squares: dict[str, float] = defaultdict(float)
        lost = set()
        for (name, parameter), norm in zip(self.parameters.items(), norms, strict=True):
            layer = layer_of(name)
            if norm >= 0 or math.isnan(norm):
                squares[layer] += (norm * factor) ** 2
            if not math.isfinite(norm) and not _is_finite(parameter):
                lost.add(layer)
        last = len(self._order)
        # Those whose outputs are not seen (they have modules inside) stay where the model names them: at the end.
        ordered = sorted(squares, key=lambda layer: self._order.get(layer, last))
        return {layer: math.sqrt(squares[layer]) for layer in ordered}, [layer for layer in ordered if layer in lost]


def _is_finite(parameter: nn.Parameter) -> bool:
    """Whether only the norm overflowed."""
    assert parameter.grad is not None, "it had a norm"
    values = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    return bool(values.isfinite().all())
