"""Compare a model in low precision with FP32: where the outputs diverge, and which module causes it.

Each module has two errors: the propagated error, with the whole model in low precision, and its own error, with only
this module in low precision, on the FP32 inputs. Both are compared with the error floor: the response, in FP32, to one
unit in the last place. A module that amplifies every rounding is not at fault. The model's own output is also held to
absolute limits.
"""

import copy
import fnmatch
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from instruments.dtypes import dtype_name
from instruments.errors import ConfigError, NumericsError
from instruments.hooks import Call, ModuleTracer, hookable_modules, trace_modules
from instruments.precision.comparison import Distance
from instruments.precision.findings import ChoiceDiff, Diff, OutputDiff
from instruments.precision.perturbation import (
    AUTOCAST,
    EqualChoiceRows,
    Key,
    LowPrecision,
    Perturbation,
    is_choice,
    kept_buffers,
    types_of,
)
from instruments.precision.verdict import DiffLimits
from instruments.tensors import Arguments, copy_arguments, find_real_tensors, find_tensors, map_tensors

# Errors that a module may raise in a number format that it does not support.
_FAILURES = (RuntimeError, TypeError, ValueError, AssertionError)
# Larger values belong to attention masks, such as FP32's lowest number.
_MASK = 1e38


class _Trial(NamedTuple):
    """Result of running one module again, separately, on the FP32 inputs."""

    outputs: Mapping[str, Tensor]
    choices: Mapping[Key, Tensor]
    failure: str = ""


class _Trials(NamedTuple):
    """Both trials of a call."""

    low: _Trial
    perturbed: _Trial


class Comparison:
    """The passes of one auto_diff and their results: run_low, run_reference, run_perturbed any number of times."""

    def __init__(
        self,
        reference: nn.Module,
        low: LowPrecision,
        perturbation: Perturbation,
        device: torch.device,
        wanted: frozenset[str],
        diff: Diff,
    ) -> None:
        """`wanted`: names of the modules to compare."""
        self.reference, self.low, self.perturbation, self.device = reference, low, perturbation, device
        self.wanted, self.diff = wanted, diff
        self.kept: dict[Key, Tensor] = {}  # low-precision outputs, later those of the reference, on the host
        self.types: dict[Call, list[torch.dtype | None]] = {}  # of arguments in low precision
        self.broken: dict[Key, Tensor] = {}  # masks of NaN and inf in low precision; inputs and outputs
        self.low_choices: dict[Key, Tensor] = {}
        self.reference_choices: dict[Key, Tensor] = {}
        self.outputs: dict[Key, OutputDiff] = {}
        self.choices: dict[Key, ChoiceDiff] = {}
        self.order: dict[Call, int] = {}  # in which the calls of the reference ended
        self._alike = EqualChoiceRows()
        self._trials: dict[Call, _Trials] = {}  # of modules that are running
        self._compared: set[Call] = set()
        self._running: list[Call] = []
        self._overflowed = False  # later overflows are inherited
        self._overflows: dict[Call, str] = {}  # of running modules, between their submodules
        self._tracer: ModuleTracer

    def run_low(self, arguments: Arguments) -> None:
        """Store outputs and the number formats of arguments. Raises NumericsError: not runnable in this precision."""
        low = self.low
        args, kwargs = low.convert(copy_arguments(arguments), None)
        tracing = trace_modules(low.model, self._after_low, self._before_low)
        try:
            with self._seeded(low.model), tracing, low.active(self.device):
                low.model(*args, **kwargs)
        except _FAILURES as error:
            place = str(self._running[-1]) if self._running else "the model"
            what = f"the model does not run in {self.diff.precision}: {next(iter(str(error).splitlines()), error)!r}"
            do = "the other mode, or keep this module in fp32" if low.mode == AUTOCAST else f"mode={AUTOCAST}"
            raise NumericsError(what, where=f"mode={low.mode}, in {place}", do=do) from error

    def _before_low(self, call: Call, _module: nn.Module, arguments: Arguments) -> None:
        self._running.append(call)
        self.types[call] = types_of(arguments)
        for path, tensor in find_real_tensors(arguments).items():
            self._note_broken((call, f"in{path}"), tensor)

    def _note_broken(self, key: Key, tensor: Tensor) -> None:
        if tensor.is_floating_point() and not bool((finite := tensor.isfinite()).all()):
            self.broken[key] = ~finite

    def _after_low(self, call: Call, _module: nn.Module, output: Any) -> None:  # noqa: ANN401 - any output
        self._running.pop()
        for path, tensor in find_real_tensors(output).items():
            if is_choice(tensor):
                self.low_choices[call, path] = tensor.clone()
            elif tensor.is_floating_point():
                self._note_broken((call, path), tensor)
                if call.module in self.wanted:
                    self.kept[call, path] = tensor.to("cpu", copy=True)

    def run_reference(self, arguments: Arguments) -> None:
        """FP32 pass: each module first runs in low precision and perturbed; then its three outputs are compared."""
        args, kwargs = copy_arguments(arguments)
        model = self.reference
        self._compared = {call for call, _path in [*self.kept, *self.low_choices] if call.module in self.wanted}
        with self._seeded(model), trace_modules(model, self._after, self._before) as self._tracer:
            model(*args, **kwargs)

    def _before(self, call: Call, module: nn.Module, arguments: Arguments) -> None:
        """Run the module perturbed, and in low precision unless its inputs have already overflowed."""
        lost = self._lost(call, arguments)
        if lost and not self._overflowed and self._running:
            self._overflowed = True
            outer, last = self._running[-1], next(reversed(self.order), "the start")
            self._overflows[outer] = f"between {last} and {call}, in the forward of {outer}: {lost}"
        self._running.append(call)
        if call in self._compared:
            low = _Trial({}, {}) if lost else self._in_low_precision(call, arguments)
            self.perturbation.restart()
            with self.perturbation.on_outputs(module):
                perturbed = self._try(call, module, self.perturbation.of(arguments))
            self._trials[call] = _Trials(low, perturbed)

    def _lost(self, call: Call, arguments: Arguments) -> str:
        """Describe the input values that are finite in FP32 only, leaving out a mask's −3e38."""
        for path, exact in find_real_tensors(arguments).items():
            broken = self.broken.get((call, f"in{path}"))
            if broken is None or broken.shape != exact.shape:
                continue
            sizes = exact.abs()[broken.to(exact.device) & exact.isfinite() & (exact.abs() < _MASK)]
            if len(sizes):
                share = f"{len(sizes):,} of {exact.numel():,} values"
                return f"{share} are not finite in {self.diff.precision}, in FP32 up to {sizes.max():.3g}"
        return ""

    def _after(self, call: Call, module: nn.Module, output: Any) -> None:  # noqa: ANN401 - any output of a module
        """Compare the three outputs, and store the FP32 one for the perturbed pass."""
        tensors = find_real_tensors(output)
        self.order[self._running.pop()] = len(self.order)
        self._overflowed |= any(
            (call, path) in self.broken and bool(tensor.isfinite().all()) for path, tensor in tensors.items()
        )
        overflow = self._overflows.pop(call, "")
        self.diff.overflows += [overflow] * bool(overflow)
        trials = self._trials.pop(call, None)
        for path, tensor in tensors.items():
            if is_choice(tensor):
                self.reference_choices[call, path] = tensor.clone()
                if (call, path) in self.low_choices:
                    share = self._alike.update(tensor, self.low_choices[call, path])
                    self.choices[call, path] = ChoiceDiff(call, path, share)
        if trials is None:
            return
        for path, tensor in tensors.items():
            if (call, path) in self.kept:
                found = self._compare(call, path, module, tensor, trials)
                found.overflow = overflow
                self.outputs[call, path] = found
                self.kept[call, path] = tensor.to("cpu", copy=True)

    def _compare(self, call: Call, path: str, module: nn.Module, exact: Tensor, trials: _Trials) -> OutputDiff:
        arrived = self.kept[call, path]
        found = OutputDiff(
            call, path, type(module).__name__, sum(1 for _ in module.modules()) - 1, tuple(exact.shape),
            dtype=dtype_name(arrived.dtype), own_failure=trials.low.failure,
            limits=self.diff.limits,
        )  # fmt: skip
        found.propagated = self._alike.distance(exact, arrived.to(exact.device))
        found.own, floor = (
            EqualChoiceRows(self.reference_choices, trial.choices).distance(exact, trial.outputs.get(path))
            for trial in (trials.low, trials.perturbed)
        )
        if floor is not None:
            found.own_floor = self._floor(floor, chained=found.parts > 0)
        return found

    def _in_low_precision(self, call: Call, arguments: Arguments) -> _Trial:
        module = self.low.model.get_submodule(call.module)
        with self.low.active(self.device):
            return self._try(call, module, self.low.convert(arguments, self.types.get(call)))

    def _try(self, call: Call, module: nn.Module, arguments: Arguments) -> _Trial:
        choices: dict[Key, Tensor] = {}

        def collect(call: Call, _module: nn.Module, output: Any) -> None:  # noqa: ANN401 - any output of a module
            found = find_real_tensors(output).items()
            choices.update({(call, path): tensor.clone() for path, tensor in found if is_choice(tensor)})

        args, kwargs = arguments
        inside = trace_modules(
            module, collect, prefix=call.module, counts={**self._tracer.counts, call.module: call.number}
        )
        try:
            with self._tracer.closed(), self._seeded(module), inside:
                return _Trial(find_real_tensors(module(*args, **kwargs)), choices)
        except _FAILURES as error:
            return _Trial({}, choices, str(error).partition("\n")[0] or type(error).__name__)

    def run_perturbed(self, arguments: Arguments, draw: int) -> None:
        """FP32 pass with every module output off by one unit in the last place; measures the error floor.

        `draw`: number of the series of coin tosses.
        """
        model, perturbation, alike = self.reference, self.perturbation, EqualChoiceRows()

        def after(call: Call, _module: nn.Module, output: Any) -> None:  # noqa: ANN401 - any output of a module
            """Compare with the reference; the largest distance of all draws is the floor."""
            tensors = find_real_tensors(output)
            for path, tensor in tensors.items():
                if is_choice(tensor) and (call, path) in self.choices:
                    alike.update(self.reference_choices[call, path], tensor)
            for path, tensor in tensors.items():
                found = self.outputs.get((call, path))
                if found is not None:
                    distance = alike.distance(self.kept[call, path].to(tensor.device), tensor)
                    if distance is not None:
                        floor = self._floor(distance, chained=True)
                        found.propagated_floor = max(floor, found.propagated_floor or 0.0)

        perturbation.restart(draw)
        args, kwargs = perturbation.of(copy_arguments(arguments))
        with self._seeded(model), perturbation.on_outputs(model), trace_modules(model, after):
            model(*args, **kwargs)

    def _floor(self, perturbed: Distance, *, chained: bool) -> float:
        """Error floor from a perturbed run: at least half a unit in the last place, or one unit if `chained`.

        An output dominated by one huge value is off by that much in every draw, and by more after several modules.
        """
        return max(perturbed.normalised_l2, torch.finfo(self.low.dtype).eps * (1.0 if chained else 0.5))

    @contextmanager
    def _seeded(self, model: nn.Module) -> Iterator[None]:
        """Seed torch's random numbers inside; restore their state and the model's buffers on exit."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []), kept_buffers(model):
            torch.manual_seed(self.perturbation.seed)
            yield

    def finish(self) -> None:
        """Fill `diff` with the results, in the order of the reference pass."""
        self.diff.outputs = sorted(self.outputs.values(), key=lambda output: self.order[output.call])
        self.diff.choices = sorted(self.choices.values(), key=lambda choice: self.order[choice.call])
        self.diff.only_one = [str(call) for call in self.types.keys() ^ self.order.keys()]
        called = {call.module for call in self.order}
        # Outermost modules that did not run; containers without a forward are left out.
        for name, module in hookable_modules(self.reference):
            runs = getattr(type(module), "forward", None) is not nn.Module.forward
            below = any(name.startswith(f"{outer}.") for outer in self.diff.unused)
            if name and runs and name not in called and not below:
                self.diff.unused.append(name)


@contextmanager
def reference_of(model: nn.Module) -> Iterator[nn.Module]:
    """The model in evaluation mode, or an FP32 copy if it is in another precision."""
    weights = [one.dtype for one in model.parameters() if one.is_floating_point()]
    held = [*weights, *(one.dtype for one in model.buffers() if one.is_floating_point())]
    if torch.float64 in weights or any(dtype.itemsize < 4 for dtype in held):
        yield copy.deepcopy(model).float().eval()
    else:
        with _evaluated(model):
            yield model


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; the training mode is restored on exit."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def arguments_of(
    model: nn.Module, sample: Mapping[str, Any] | Sequence[Any] | Tensor, device: torch.device
) -> Arguments:
    """Positional and keyword arguments, floating-point tensors in FP32; no key-value cache, as modules write to it."""
    if isinstance(sample, Tensor):
        sample = (sample,)
    args, kwargs = ((), dict(sample)) if isinstance(sample, Mapping) else (tuple(sample), {})
    if _takes_cache(model):
        kwargs.setdefault("use_cache", False)
    placed: Arguments = map_tensors(
        lambda tensor: tensor.to(device, torch.float32 if tensor.is_floating_point() else tensor.dtype), (args, kwargs)
    )
    return placed


def _takes_cache(model: nn.Module) -> bool:
    """Whether the model, or the one to which a wrapper such as PEFT's passes its arguments, takes `use_cache`."""
    parameters, inside = inspect.signature(model.forward).parameters, list(model.children())
    passes_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return "use_cache" in parameters or (passes_on and len(inside) == 1 and _takes_cache(inside[0]))


# Perturbed passes; in a single one, it is chance whether a choice near the border changes.
DRAWS = 3


@torch.no_grad()
def auto_diff(
    model: nn.Module,
    sample: Mapping[str, Any] | Sequence[Any] | Tensor,
    *,
    precision: str | torch.dtype = "bfloat16",
    mode: str = AUTOCAST,
    low: nn.Module | None = None,
    modules: Sequence[str] = ("*",),
    limits: DiffLimits | None = None,
    seed: int = 0,
) -> Diff:
    """Compare a model in low precision with itself in FP32.

    Args:
        model: runs in evaluation mode; its mode and buffers are restored. If it is not in FP32, an FP32 copy runs.
        sample: keyword arguments, or positional ones; copied.
        precision: bfloat16 or float16; "bf16" and "fp16" are the same.
        mode: autocast, or cast: `model.to(precision)`.
        low: for mode=cast, a low-precision model made in another way (`from_pretrained(dtype=...)`).
        modules: globs on names of modules to compare; the model's own output always is. Their outputs stay in host
            memory, in FP32.
        limits: on errors; None: the defaults.
        seed: of the perturbation, and of random numbers that the model draws.
    Raises:
        ConfigError: an invalid setting.
        NumericsError: the model does not run in this precision.
    """
    wanted = _select(model, modules)
    with reference_of(model) as reference, nullcontext() if low is None else _evaluated(low):
        tensors = chain(reference.parameters(), reference.buffers(), find_tensors(sample).values())
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        lowered = LowPrecision(reference, precision, mode, low)
        diff = Diff(dtype_name(lowered.dtype), mode, limits or DiffLimits())
        passes = Comparison(reference, lowered, Perturbation(lowered.dtype, seed), device, wanted, diff)
        arguments = arguments_of(reference, sample, device)
        passes.run_low(arguments)
        passes.run_reference(arguments)
        for draw in range(DRAWS):
            passes.run_perturbed(arguments, draw)
        passes.finish()
    return diff


def _select(model: nn.Module, patterns: Sequence[str]) -> frozenset[str]:
    names = [name for name, _ in model.named_modules()]
    chosen = {""}
    for pattern in patterns:
        if not (fitting := fnmatch.filter(names, pattern)):
            example = names[len(names) // 2] or "*"
            do = f"modules=['{example}'], or ['*'] for all"
            raise ConfigError(f"no module is called {pattern}", where="setting modules", do=do)
        chosen.update(fitting)
    return frozenset(chosen)
