"""From the numbers of a step to what is wrong with it."""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from instruments.errors import ConfigError, some
from instruments.precision.calls import in_backward
from instruments.training_watch.step_log import NOTE, SEVERE, WARNING, Anomaly, StepReport, WatchConfig

MISSING = -1.0  # the norm of a gradient that is not there
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "module.")


@torch.no_grad()
def gradient_norms(parameters: Sequence[nn.Parameter]) -> Tensor:
    """L2 norm of each of P parameters' gradients, `MISSING` where there is none, on the first one's device.

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
        found = torch._foreach_norm([grad for _place, grad in group], 2, dtype=torch.float32)
        norms_P[[place for place, _grad in group]] = torch.stack(found).to(device)
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


def layer_of(name: str) -> str:
    """The module that owns a parameter, without the names that wrappers put before it."""
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper) if wrapper == "module." else name.replace(wrapper, "")
    return name.rpartition(".")[0] or name


@dataclass(frozen=True)
class Output:
    """Of a module: the largest absolute value, in which format; NaN where it holds any."""

    module: str
    dtype: torch.dtype
    value: float

    @property
    def format(self) -> str:
        """As in "float16"."""
        return str(self.dtype).removeprefix("torch.")


def judge_finiteness(
    loss: float | None, lost: Sequence[str], outputs: Sequence[Output], *, scaled: bool
) -> list[Anomaly]:
    """NaN and inf, with the place where they come from.

    Args:
        loss: None where it is not known.
        lost: layers whose gradient holds NaN or inf, in the order they run.
        outputs: in the order they were computed.
        scaled: a GradScaler skips steps that are not finite.
    """
    bad = next((place for place, output in enumerate(outputs) if not math.isfinite(output.value)), None)
    backwards = list(reversed(lost))
    if bad is not None:
        first, before = outputs[bad], outputs[bad - 1].module if bad else "the model's input"
        word = "NaN" if math.isnan(first.value) else "inf"
        what = f"{word} first in the output of {first.module} ({first.format}); finite until {before}"
        return [Anomaly("not_finite", SEVERE, what, (first.module, *backwards))]
    if loss is not None and not math.isfinite(loss):
        what = f"the loss is {loss:g}{_finite_outputs(outputs)}: compute it in float32, inside autocast"
        if backwards:
            what += f"; backwards, the first layer whose gradient is not finite is {backwards[0]}"
        return [Anomaly("not_finite", SEVERE, what, tuple(backwards))]
    if not backwards:
        return []
    what = f"backwards, the first gradient that is not finite is that of {backwards[0]}, of {len(backwards)} layers"
    if scaled:
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
        what = f"no gradient to speak of in {some(dead, 3, ', ')}: at most {config.dead:g} of the median layer's "
        what += f"{typical:.2g}"
        found.append(Anomaly("dead_layer", WARNING, what, tuple(dead)))
    if total < config.vanishing:
        what = f"the gradient vanishes: its norm is {total:.2g}, below {config.vanishing:g}"
        found.append(Anomaly("vanishing", SEVERE, what))
    elif low:
        what = f"gradient norms below {config.vanishing:g}: {_with_norms(low, layers)}"
        found.append(Anomaly("vanishing", WARNING, what, tuple(low)))
    if total > config.exploding:
        high = high or [max(layers, key=lambda name: layers[name])]
        what = f"the gradient explodes: its norm is {total:.3g}, above {config.exploding:g}"
        found.append(Anomaly("exploding", WARNING, f"{what}; largest: {_with_norms(high, layers)}", tuple(high)))
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
    largest, last = max(outputs, key=lambda output: output.value), outputs[-1]
    ends = f"largest {largest.value:.3g} in {largest.module}, {largest.format}; last {last.module}, {last.format}"
    return f", while all outputs of the model are finite ({ends})"


def _with_norms(names: Sequence[str], layers: Mapping[str, float]) -> str:
    return some([f"{name} ({layers[name]:.2g})" for name in names], 3, ", ")


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
        what = f"the loss scale is {scale:g}: overflows go on without any scaling, and float16 gradients underflow"
        found.append(Anomaly("loss_scale", SEVERE, what))
    elif scale < config.low_scale:
        what = f"the loss scale is {scale:g}, below {config.low_scale:g}: small gradients underflow in float16"
        found.append(Anomaly("loss_scale", WARNING, what))
    latest_first = pairwise([scale, *reversed(history)])
    falls = sum(1 for _ in takewhile(lambda pair: pair[0] < pair[1], latest_first))
    if falls >= config.falls:
        what = f"the loss scale fell {falls} steps in a row, to {scale:g}: something overflows at every scale"
        found.append(Anomaly("falling_scale", WARNING, what))
    return found


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
    """Hooks on the modules that have no others inside, and the loss scales so far."""

    def __init__(self, model: nn.Module, trainable: dict[str, nn.Parameter], config: WatchConfig) -> None:
        """Put the hooks on, where outputs are wanted. Raises ConfigError."""
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
            raise ConfigError(
                "the model is sharded by FullyShardedDataParallel, whose flat parameters hide the layers",
                where="watch_model",
                do="shard with torch.distributed.fsdp.fully_shard, or watch the model without sharding",
            )
        self.config, self.parameters = config, trainable
        self.device = next((p.device for p in [*trainable.values(), *model.parameters()]), torch.device("cpu"))
        self.peaks: list[tuple[str, torch.dtype, Tensor]] = []  # of outputs since the last `read`, on their devices
        leaves = [(name, module) for name, module in model.named_modules() if next(module.children(), None) is None]
        self.handles = [
            module.register_forward_hook(self._hook(layer_of(f"{name}.") if name else type(module).__name__))
            for name, module in (leaves if config.activations else [])
        ]
        self.scales: list[float] = []
        self._order: dict[str, int] = {}  # of modules, as they first ran

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(_module: nn.Module, _inputs: Any, output: Any) -> None:  # noqa: ANN401 - any output of a module
            # Not held-out text, nor what is computed once more in the backward pass.
            if torch.is_grad_enabled() and not in_backward():
                for part in tree_leaves(output):
                    if isinstance(part, Tensor) and part.is_floating_point() and part.numel() and not part.is_sparse:
                        low, high = torch.aminmax(part.detach())  # one pass that copies nothing
                        self.peaks.append((name, part.dtype, torch.maximum(-low, high).float()))

        return look

    @torch.no_grad()
    def read(
        self, step: int, loss: Tensor | float | None, scaler: GradScaler | None, factor: Tensor | None
    ) -> StepReport:
        """The report of a step, whose gradients are to be multiplied by `factor`; one transfer from the device."""
        peaks, self.peaks = self.peaks, []
        norms_P = gradient_norms(list(self.parameters.values())) if self.parameters else torch.zeros(0)
        scale = scaler.scale(torch.ones((), device=self.device)) if scaler is not None else None
        singles = [torch.as_tensor(math.nan if one is None else one) for one in (loss, scale, factor)]
        parts = [norms_P, *singles, *(value for _name, _dtype, value in peaks)]
        numbers = torch.cat([part.detach().float().reshape(-1).to(self.device) for part in parts]).tolist()
        count = len(self.parameters)
        loss_value, scale_value, factor_value = numbers[count : count + 3]
        known = None if loss is None else loss_value
        outputs = [
            Output(name, dtype, value) for (name, dtype, _), value in zip(peaks, numbers[count + 3 :], strict=True)
        ]
        layers, lost = self._by_layer(numbers[:count], 1.0 if factor is None else factor_value, outputs)
        found = judge_finiteness(known, lost, outputs, scaled=scaler is not None)
        if not lost:  # gradients that are not finite have no norms to judge
            found += judge_norms(layers, self.config)
        found += judge_range(outputs, self.config)
        if scaler is not None:
            found += check_loss_scale(scale_value, self.scales, self.config)
            self.scales = [*self.scales[-self.config.falls :], scale_value]
        largest = max(outputs, key=lambda output: (math.isnan(output.value), output.value), default=None)
        return StepReport(
            step, known, math.hypot(*layers.values()), None if scaler is None else scale_value, layers,
            None if largest is None else (largest.module, largest.value), tuple(found),
        )  # fmt: skip

    def _by_layer(
        self, norms: list[float], factor: float, outputs: Sequence[Output]
    ) -> tuple[dict[str, float], list[str]]:
        """Norms of layers that have a gradient, in the order they run; and those that hold NaN or inf."""
        if not self._order:
            self._order = {name: place for place, name in enumerate(dict.fromkeys(one.module for one in outputs))}
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
