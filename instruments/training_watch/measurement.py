"""Measurements of a step: L2 norms of gradients, also sparse and sharded ones, and ranges of module outputs."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from instruments.errors import ConfigError, some
from instruments.hooks import OwnHook, hookable_modules, in_training_pass, plain_name
from instruments.tensors import as_real, find_tensors, is_sharded
from instruments.training_watch import verdict
from instruments.training_watch.step_log import SEVERE, WARNING, Anomaly, StepReport, WatchConfig
from instruments.training_watch.verdict import History, Output

MISSING = -1.0  # in place of the norm of a missing gradient


@torch.no_grad()
def gradient_norms(parameters: Sequence[nn.Parameter]) -> Tensor:
    """L2 norm of each of P parameters' gradients, `MISSING` without one, on the first gradient's device.

    Does not wait for the device. Shards of a DTensor are added up over the processes that hold them; all of these
    processes must call. Numerics: fp32 sums of squares, which overflow for finite gradients above 1e19; fp64 for fp64.
    """
    device = next((one.device for one in parameters if one.grad is not None), torch.device("cpu"))
    missing = torch.full((), MISSING, device=device)
    norms = [missing] * len(parameters)
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = defaultdict(list)
    for place, parameter in enumerate(parameters):
        if parameter.grad is not None:
            values = _local(parameter.grad)
            groups[values.device, values.dtype].append((place, values))
    for (_device, dtype), group in groups.items():
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        found = torch._foreach_norm([grad for _place, grad in group], 2, dtype=wide)
        for (place, _grad), norm in zip(group, found, strict=True):
            norms[place] = norm.to(missing)
    _add_shards(parameters, norms)
    return torch.stack(norms) if norms else torch.empty(0)


def _local(grad: Tensor) -> Tensor:
    values: Tensor = grad.to_local() if is_sharded(grad) else grad
    # Repeated rows count as their sum.
    return as_real(values.coalesce().values() if values.is_sparse else values)


def _add_shards(parameters: Sequence[nn.Parameter], norms: list[Tensor]) -> None:
    meshes: Any = defaultdict(list)
    for place, parameter in enumerate(parameters):
        if is_sharded(parameter):
            for number, part in enumerate(parameter.placements):
                if part.is_shard():
                    meshes[parameter.device_mesh, number].append(place)
    for (mesh, number), places in meshes.items():
        mine = torch.stack([norms[place] for place in places])
        squares = torch.stack([mine.clamp_min(0).square(), (mine != MISSING).float()])
        torch.distributed.all_reduce(squares, group=mesh.get_group(number))
        whole = torch.where(squares[1] > 0, squares[0].sqrt(), MISSING)
        for place, norm in zip(places, whole.unbind(), strict=True):
            norms[place] = norm


def _is_finite(parameter: nn.Parameter) -> bool:
    """Whether the gradient is finite, so that only its norm overflowed; not if it has been dropped or zeroed since."""
    if parameter.grad is None:
        return False
    values = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    return bool(values.isfinite().all()) and bool(values.any())


def layer_of(name: str) -> str:
    """Name of the module that owns a parameter, without the prefixes of wrappers."""
    name = plain_name(name).removeprefix("module.")
    return name.rpartition(".")[0] or name


def _find_hooked(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules without submodules or with parameters of their own, by name of the layer.

    MultiheadAttention and parametrized modules use weights of submodules that they do not call.
    """
    found = []
    for name, module in hookable_modules(model):
        if not module._modules or {*module._parameters.values()} - {None} or hasattr(module, "parametrizations"):
            found.append((layer_of(f"{name}.") if name else type(module).__name__, module))
    return found


def _has_range(values: Tensor) -> bool:
    """Whether torch finds its minimum; 8-bit formats are scaled to their limits on purpose."""
    found = values.is_floating_point() and values.itemsize > 1 and values.layout is torch.strided
    return found and not values.is_nested and values.numel() > 0


# Trained weights whose values are sampled, and values of each.
_SAMPLED, _VALUES = 16, 64
# Steps in which gradients must not be zeroed, or a weight with a gradient not moved, to be reported.
_UNZEROED, _UNMOVED = 3, 5

# Calls of a module in one forward pass that are recorded separately.
_MOST_CALLS = 64
# Steps after which parameters without any gradient are reported.
_GRADIENT_STEPS = 3


class Measurement:
    """Hooks on modules, and the measurements of the steps so far."""

    def __init__(self, model: nn.Module, config: WatchConfig) -> None:
        """Raises ConfigError: flat parameters of FullyShardedDataParallel."""
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
            what = "the model is sharded by FullyShardedDataParallel, whose flat parameters hide the layers"
            do = "shard with torch.distributed.fsdp.fully_shard, or watch the model without sharding"
            raise ConfigError(what, where="watch_model", do=do)
        if config.every_steps < 1:
            what = f"every_steps={config.every_steps} is below 1"
            raise ConfigError(what, where="watch_model", do="WatchConfig(every_steps=10)")
        self.model, self.config = model, config
        self.parameters = dict(model.named_parameters())  # frozen ones too, as they may be unfrozen later
        trained = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        real = (parameter.device for parameter in [*trained, *model.parameters()] if not parameter.is_meta)
        self.device = next(real, torch.device("cpu"))
        # Minimum and maximum of outputs since the last `read`, by module, its call in a pass, format and device: the
        # replicas of nn.DataParallel, which Trainer makes for several GPUs, share the hooks.
        self.peaks: dict[tuple[str, int, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}
        self.calls: Counter[str] = Counter()  # in this forward pass
        self._modules = _find_hooked(model)
        self._hooked = frozenset(name for name, _module in self._modules)
        self.scales: list[float] = []
        self._histories: dict[int | None, History] = defaultdict(History)  # by id of the optimizer
        self._was_read = False  # `peaks` have been reported; the next output starts new ones
        self._looks = True  # at outputs, in this step
        self._order: dict[str, int] = {}  # module → place in the order of execution
        self._steps_without: Counter[str] = Counter()  # parameter → steps without a gradient
        self.with_gradient: set[str] = set()  # parameters that had one in any step
        self._named: set[str] = set()  # parameters without a gradient that have been reported
        self._sampled = self._choose_sampled(trained)
        self._before: tuple[Tensor, Tensor] | None = None  # sampled values, and which of them had a gradient
        self._still: Tensor | None = None  # share of the sampled values with a gradient that a step did not change
        self._intact: Tensor | None = None  # whether all sampled values were finite before the step
        self._sizes: list[int] = []  # numbers of sampled values of each weight
        self._plain_optimizer = False  # one of torch.optim steps, with a learning rate above 0
        self._unzeroed = 0  # steps whose gradients were not zeroed; -1: zeroed once, or reported
        self._versions: dict[str, int] = {}
        self._unmoved: Counter[str] = Counter()  # parameter → steps of others in which it had a gradient
        self._moved: set[str] = set()  # parameters that moved once, that an optimizer has, or that are reported
        self._unseen = 0  # steps in which trained modules had no recorded output; -1 once reported

    def add_hooks(self) -> Iterator[RemovableHandle]:
        """Hook the modules one by one."""
        for name, module in self._modules:
            look = self._hook(name, owns=next(module.parameters(), None) is not None)
            yield module.register_forward_hook(OwnHook(look))

    def _hook(self, name: str, *, owns: bool) -> Callable[[nn.Module, Any, Any], None]:
        """`owns`: the module has parameters. Without, only outputs with a gradient count: others may be masks."""

        def look(_module: nn.Module, _inputs: Any, output: Any) -> None:  # noqa: ANN401 - any output of a module
            if not (self._looks or self._was_read) or not in_training_pass():
                return
            if self._was_read:  # the first output of the next step
                self.peaks.clear()
                self.calls.clear()
                self._was_read = False
            if not self._looks:
                return
            call = min(self.calls[name], _MOST_CALLS)
            self.calls[name] += 1
            parts = [part.detach() for part in find_tensors(output).values() if owns or part.requires_grad]
            for part in (as_real(part.to_local() if is_sharded(part) else part) for part in parts):
                if _has_range(part):
                    low, high = torch.aminmax(part)  # one pass, no copy
                    key = name, call, part.dtype, part.device
                    if (before := self.peaks.get(key)) is not None:
                        low, high = torch.minimum(low, before[0]), torch.maximum(high, before[1])
                    self.peaks[key] = low, high

        return look

    def _choose_sampled(self, trained: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Evenly spaced weights; 16-bit ones if there are any, since only their steps are rounded away."""
        usable = [
            one for one in trained if one.is_floating_point() and not (is_sharded(one) or one.is_meta or is_lazy(one))
        ]
        half = [one for one in usable if one.dtype.itemsize == 2]
        chosen = [one for one in half or usable if one.numel()]
        return chosen[:: -(-len(chosen) // _SAMPLED)] if chosen else []

    @torch.no_grad()
    def sample_weights(self, *, stepped: bool) -> None:
        """At the end of a backward pass: which sampled values have not changed since the last one, if one `stepped`."""
        if not self._sampled:
            return
        now_N, self._sizes = self._sample(self._sampled)
        pairs = [(one, one.grad) for one in self._sampled]
        # Zeros that take no memory.
        dense = [one.new_zeros(()).expand_as(one) if grad is None or grad.is_sparse else grad for one, grad in pairs]
        live_N = self._sample(dense)[0] != 0
        self._still, self._intact = None, now_N.isfinite().all()
        before_N, was_live_N = self._before or (now_N[:0], live_N[:0])
        if now_N.shape == live_N.shape == before_N.shape:  # a weight may have got another shape
            if stepped:
                count = was_live_N.sum()
                self._still = torch.where(count > 0, ((now_N == before_N) & was_live_N).sum() / count, 0)
            else:
                live_N |= was_live_N
        self._before = now_N, live_N

    def _sample(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
        """Values of all, and how many of each."""
        values = [one.detach().reshape(-1)[:: max(1, one.numel() // _VALUES)] for one in tensors]
        wide = [one.to(self.device, torch.promote_types(one.dtype, torch.float32)) for one in values]
        return torch.cat(wide), [len(one) for one in values]

    def note_zeroed(self, norms_P: Tensor, *, counts: bool) -> None:
        """At the start of any backward pass: whether the largest gradient is still there.

        The first after a step `counts`, but gradients may be zeroed up to the model's own, behind those of others.
        """
        if self._unzeroed < 0 or self._unzeroed >= _UNZEROED or len(self._histories) > 1:
            return
        grad = [*self.parameters.values()][int(norms_P.argmax())].grad
        self._unzeroed = self._unzeroed + counts if grad is not None and bool(_local(grad).any()) else -1

    def versions(self) -> dict[str, int]:
        """Number of changes in place of each parameter."""
        return {name: one._version for name, one in self.parameters.items() if not one.is_inference()}

    def note_steps(self, followed: Collection[str], optimizers: Sequence[Any]) -> None:
        """Count the steps that moved weights, but not those with a gradient that no optimizer has (`followed`)."""
        groups = [
            group for one in optimizers if type(one).__module__.startswith("torch.optim") for group in one.param_groups
        ]
        self._plain_optimizer = any(float(group.get("lr", 0)) > 0 for group in groups)
        versions = self.versions()
        moved = {name for name, version in versions.items() if self._versions.get(name, version) != version}
        self._versions = versions
        self._moved |= moved | set(followed)
        if moved:
            self._unmoved.update(self.with_gradient - self._moved)

    def _judge_use(self) -> list[Anomaly]:
        """Gradients that are never zeroed, and parameters with gradients in no optimizer; each reported once."""
        found = []
        if self._unzeroed == _UNZEROED:
            self._unzeroed = -1
            what = f"gradients of {_UNZEROED} steps were there at the next backward pass, which adds to them: zero them"
            found.append(Anomaly("not_zeroed", WARNING, what))
        late = [name for name, count in self._unmoved.items() if count >= _UNMOVED and name not in self._moved]
        if late:
            self._moved.update(late)
            what = (
                f"no step changes {len(late)} parameters with gradients: {some(late, 6, ', ')}; no optimizer has them"
            )
            found.append(Anomaly("not_stepped", WARNING, what, tuple(dict.fromkeys(map(layer_of, late)))))
        return found

    def _judge_weights(self, still: float | None, intact: float | None, history: History) -> list[Anomaly]:
        """Weights that are not finite before the step, and 16-bit weights whose steps are rounded away."""
        half = bool(self._sampled) and self._sampled[0].dtype.itemsize == 2
        if intact == 0 and self._before is not None:  # the step may be over: judge the values from before
            names = {id(one): name for name, one in self.parameters.items()}
            parts = zip(self._sampled, self._before[0].split(self._sizes), strict=True)
            broken = [names[id(one)] for one, part in parts if not bool(part.isfinite().all())]
            what = f"{len(broken)} of {len(self._sizes)} sampled parameters were not finite before the step: "
            what += some(broken, 3, ", ")
            what += "; in float16, Adam's eps of 1e-8 is 0" * (half and self._sampled[0].dtype == torch.float16)
            return [Anomaly("not_finite", SEVERE, what, tuple(dict.fromkeys(map(layer_of, broken))))]
        if half and still is not None and self._plain_optimizer:
            return verdict.judge_stalled(still, self._sampled[0].dtype, history)
        return []

    @torch.no_grad()
    def read(
        self,
        step: int,
        loss: Tensor | float | None,
        scale: Tensor | None,
        norms_P: Tensor | None,
        *,
        only: Collection[str],
        optimizer: int | None,
    ) -> StepReport:
        """Report of a step.

        `scale`: the loss scale, by which gradients are multiplied; `norms_P`: gradient norms, None: measured now;
        `only`: names of the parameters that count; `optimizer`: id of the one that makes the step, whose norms are
        compared with those of its earlier steps.
        """
        norms, known_loss, known_scale, outputs, still, intact = self._fetch(loss, scale, norms_P)
        history = self._histories[optimizer]
        norms = {name: norm for name, norm in norms.items() if name in only and self.parameters[name].requires_grad}
        layers, lost = self._by_layer(norms, 1 / known_scale if known_scale else 1.0, outputs)
        found = self._judge_weights(still, intact, history)
        found += verdict.judge_finiteness(known_loss, lost, outputs, scaled=scale is not None)
        if not lost:  # non-finite gradients have no norms to judge
            idle = self._order.keys() - {output.module for output in outputs} if outputs else ()
            found += verdict.judge_norms(layers, self.config, history, idle)
            found += verdict.judge_loss(known_loss, history)
        found += verdict.judge_range(outputs)
        missing = [name for name, norm in norms.items() if norm == MISSING]
        self._steps_without.update(missing)
        self.with_gradient |= norms.keys() - set(missing)
        found += self.name_without_gradient(_GRADIENT_STEPS) + self._judge_unseen(layers, outputs)
        found += self._judge_use()
        if known_scale is not None:
            found += verdict.check_loss_scale(known_scale, self.scales)
            self.scales = [*self.scales[-verdict.FALLS :], known_scale]
        self._looks = (step + 1) % self.config.every_steps == 0
        norm = math.hypot(*layers.values())
        return StepReport(step, known_loss, norm, known_scale, layers, tuple(found), _ranges(outputs))

    def _fetch(
        self, loss: Tensor | float | None, scale: Tensor | None, norms_P: Tensor | None
    ) -> tuple[dict[str, float], float | None, float | None, list[Output], float | None, float | None]:
        """Gradient norms by parameter, loss, loss scale, output ranges, facts of sampled weights: one transfer."""
        self._was_read = True
        if norms_P is None:
            norms_P = gradient_norms([*self.parameters.values()]) if self.parameters else torch.zeros(0)
        facts = (loss, scale, self._still, self._intact)
        singles = [torch.as_tensor(one) for one in facts if one is not None]
        parts = [norms_P, *singles, *(value for pair in self.peaks.values() for value in pair)]
        wide = any(part.dtype == torch.float64 and part.device == self.device for part in parts)
        kind = torch.float64 if wide else torch.float32
        numbers = iter(torch.cat([part.detach().to(self.device, kind).reshape(-1) for part in parts]).tolist())
        norms = {name: next(numbers) for name in self.parameters}
        known_loss, known_scale, still, intact = (None if one is None else next(numbers) for one in facts)
        self._still = self._intact = None  # of this step alone
        outputs = [Output(name, dtype, next(numbers), next(numbers)) for name, _call, dtype, _ in self.peaks]
        return norms, known_loss, known_scale, outputs, still, intact

    def _by_layer(
        self, norms: Mapping[str, float], factor: float, outputs: Sequence[Output]
    ) -> tuple[dict[str, float], list[str]]:
        """Gradient norms by layer, and layers with NaN or inf; both in the order of execution."""
        for output in outputs:
            self._order.setdefault(output.module, len(self._order))
        squares: dict[str, float] = defaultdict(float)
        lost = set()
        for name, norm in norms.items():
            layer = layer_of(name)
            if norm >= 0 or math.isnan(norm):
                squares[layer] += (norm * factor) ** 2
            if not math.isfinite(norm) and not _is_finite(self.parameters[name]):
                lost.add(layer)
        last = len(self._order)
        # Layers whose outputs are not recorded come last, in the model's order.
        ordered = sorted(squares, key=lambda layer: self._order.get(layer, last))
        return {layer: math.sqrt(squares[layer]) for layer in ordered}, [layer for layer in ordered if layer in lost]

    def name_without_gradient(self, steps: int) -> list[Anomaly]:
        """Find parameters without any gradient so far, for at least `steps` steps; each is reported once.

        The limit is `repeat_steps` for experts, and for all parameters if some get gradients in some steps only.
        """
        patient = not self.with_gradient.isdisjoint(self._steps_without)
        done = self.with_gradient | self._named
        late = [
            name
            for name, count in self._steps_without.items()
            if name not in done
            and count >= (self.config.repeat_steps if patient or "expert" in name.lower() else steps)
        ]
        if not late:
            return []
        self._named.update(late)
        ran = [name for name in late if layer_of(name) in self._order]
        why = "they" if len(ran) == len(late) else some(ran, 3, ", ")
        why = f"; {why} ran, but the loss does not depend on them" if ran else ""
        what = f"{len(late)} parameters that should learn have never got a gradient: {some(late, 6, ', ')}{why}"
        return [Anomaly("no_gradient", WARNING, what, tuple(dict.fromkeys(map(layer_of, late))))]

    def _judge_unseen(self, layers: Mapping[str, float], outputs: Sequence[Output]) -> list[Anomaly]:
        """Find trained modules whose outputs no hook has recorded; reported once."""
        seen = {output.module for output in outputs}
        unseen = [name for name in layers if name in self._hooked and name not in seen]
        if self._unseen < 0 or not unseen or not self._looks:
            return []
        compiled = any(
            type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
            for module in self.model.modules()
        )
        if seen and not compiled:
            return []
        self._unseen += 1
        if not compiled and self._unseen == 1:  # the first step's forward pass may have run before the hooks
            return []
        self._unseen = -1
        what = f"the outputs of {len(unseen)} modules are unseen: torch.compile bypasses hooks; gradients are watched"
        return [Anomaly("outputs_unseen", WARNING, f"{what} ({some(unseen, 3, ', ')})", tuple(unseen))]


def _ranges(outputs: Sequence[Output]) -> dict[str, tuple[float, float]]:
    """Minimum and maximum by module; NaN if one of its outputs has NaN."""
    found: dict[str, tuple[float, float]] = {}
    for output in outputs:
        low, high = found.get(output.module, (math.inf, -math.inf))
        odd = math.isnan(output.value) or math.isnan(low)
        found[output.module] = (math.nan,) * 2 if odd else (min(low, output.low), max(high, output.high))
    return found
