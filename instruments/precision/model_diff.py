"""Compare a model in low precision with FP32: where the outputs diverge, and which module causes it.

Each module has two errors: the propagated error, with the whole model in low precision, and its own error, with only
this module in low precision, on the FP32 inputs. Both are compared with the error floor: the response, in FP32, to one
unit in the last place. A module that amplifies every rounding is not at fault. The model's own output is also held to
absolute limits.

Outputs are stored on the host. If `memory_mib` is too small for all of them, the model runs again for each further
window of outputs.
"""

import copy
import fnmatch
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from instruments.errors import ConfigError, NumericsError
from instruments.precision.calls import (
    Arguments,
    Call,
    ModuleEvents,
    ModuleTracer,
    copy_arguments,
    dtype_name,
    find_real_tensors,
    find_tensors,
    map_tensors,
    trace_modules,
)
from instruments.precision.comparison import axis_ranges, find_format, measure_distance, rows_with_error
from instruments.precision.findings import ChoiceDiff, Diff, OutputDiff
from instruments.precision.session import (
    AUTOCAST,
    FAILURES,
    Choices,
    EqualChoiceRows,
    Key,
    LowPrecision,
    Perturbation,
    Session,
    is_choice,
    kept_buffers,
    types_of,
)
from instruments.precision.tensor_analysis import find_swamping, sums_up
from instruments.precision.verdict import DiffLimits


class _Trial(NamedTuple):
    """Result of running one module again, separately, on the FP32 inputs."""

    outputs: Mapping[str, Tensor]
    choices: Mapping[Key, Tensor]
    failure: str = ""


class ReferencePass(ModuleEvents):
    """FP32 pass: each module first runs in low precision and perturbed; then its three outputs are compared."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._window = {call for call, _ in session.waiting}
        if session.windows == 1:  # modules whose only outputs are choices
            self._window |= {call for call, _ in session.low_choices if call.module in session.wanted}
        self._alike = EqualChoiceRows()
        self._trials: dict[Call, tuple[_Trial, _Trial]] = {}
        self._arguments: dict[Call, Arguments] = {}  # of modules that are running
        self._running: list[Call] = []
        self._last: Call | None = None  # the call that ended last
        self._overflowed = False  # later overflows are inherited
        self._overflows: dict[Call, str] = {}  # of running modules, between their submodules
        self._tracer: ModuleTracer

    def run(self, arguments: Arguments) -> None:
        """One forward pass; every module runs twice more for itself and for each of its ancestors."""
        args, kwargs = copy_arguments(arguments)
        model = self.session.reference
        with self.session.seeded(), kept_buffers(model), trace_modules(model, self) as self._tracer:
            model(*args, **kwargs)

    def before(self, call: Call, module: nn.Module, arguments: Arguments) -> None:
        """Run the module perturbed, and in low precision unless its inputs have already overflowed."""
        lost = self._lost(call, arguments)
        if lost and not self._overflowed and self._running:
            self._overflowed = True
            last = self._last or "the start"
            self._overflows[self._running[-1]] = (
                f"between {last} and {call}, in the forward of {self._running[-1]}: {lost}"
            )
        self._running.append(call)
        if call in self._window:
            low = _Trial({}, {}) if lost else self._in_low_precision(call, arguments)
            self._trials[call] = low, self._perturbed(call, module, arguments)
            self._arguments[call] = arguments

    def _lost(self, call: Call, arguments: Arguments) -> str:
        """Describe the input values that are finite in FP32 only, leaving out a mask's −3e38."""
        for path, exact in find_real_tensors(arguments).items():
            broken = self.session.broken.get((call, f"in{path}"))
            if broken is None or broken.shape != exact.shape:
                continue
            sizes = exact.abs()[broken.to(exact.device) & exact.isfinite() & (exact.abs() < _MASK)]
            if len(sizes):
                share = f"{len(sizes):,} of {exact.numel():,} values"
                return f"{share} are not finite in {self.session.diff.precision}, in FP32 up to {sizes.max():.3g}"
        return ""

    def after(self, call: Call, module: nn.Module, output: Any) -> None:  # noqa: ANN401 - any output of a module
        """Compare the three outputs, and store the FP32 one for the perturbed pass."""
        session = self.session
        session.order.setdefault(call, len(session.order))
        tensors = find_real_tensors(output)
        self._last = self._running.pop()
        self._overflowed |= any(
            (call, path) in session.broken and bool(tensor.isfinite().all()) for path, tensor in tensors.items()
        )
        overflow = self._overflows.pop(call, "")
        if session.windows == 1:
            session.diff.silent += [str(call)] * (not tensors)
            session.diff.overflows += [overflow] * bool(overflow)
        trials = self._trials.pop(call, None)
        swamped = self._swamping(call, module, output)
        for path, tensor in tensors.items():
            if is_choice(tensor):
                self._choose((call, path), tensor, trials[0].outputs.get(path) if trials else None)
        for path, tensor in tensors.items():
            if (call, path) in session.waiting and trials is not None:
                found = self._compare(call, path, module, tensor, trials)
                found.swamped, found.overflow = swamped, overflow
                session.outputs[call, path] = found
                session.waiting[call, path] = tensor.to("cpu", copy=True)

    def _choose(self, key: Key, chosen: Tensor, own: Tensor | None) -> None:
        session = self.session
        session.reference_choices[key] = chosen.clone()
        if key in session.low_choices:
            found = ChoiceDiff(*key, chosen.numel() // chosen.shape[-1])
            found.propagated = self._alike.update(chosen, session.low_choices[key])
            found.own = None if own is None else EqualChoiceRows().update(chosen, own)
            session.choices.setdefault(key, found)

    def _compare(
        self, call: Call, path: str, module: nn.Module, exact: Tensor, trials: tuple[_Trial, _Trial]
    ) -> OutputDiff:
        arrived, (own, perturbed) = self.session.waiting[call, path], trials
        found = OutputDiff(
            call, path, type(module).__name__, sum(1 for _ in module.modules()) - 1, tuple(exact.shape),
            dtype=dtype_name(arrived.dtype), ranges=axis_ranges(exact), own_failure=own.failure,
            limits=self.session.diff.limits,
        )  # fmt: skip
        found.propagated = self._alike.distance(exact, arrived.to(exact.device))
        if found.propagated is not None:
            found.unaligned = measure_distance(exact, arrived.to(exact.device)).normalised_l2
        found.own, floor = (
            EqualChoiceRows(self.session.reference_choices, trial.choices).distance(exact, trial.outputs.get(path))
            for trial in (own, perturbed)
        )
        found.own_floor = None if floor is None else self.session.floor(floor, chained=found.parts > 0)
        if floor is not None and exact.ndim > 1 and exact.numel():
            found.floor_rows = rows_with_error(exact, perturbed.outputs[path])
        return found

    def _swamping(self, call: Call, module: nn.Module, output: Any) -> str:  # noqa: ANN401 - any output of a module
        arguments = self._arguments.pop(call, None)
        if arguments is None or not sums_up(module, arguments, output):
            return ""

        return find_swamping(
            arguments, self.session.low.dtype,
            exact=lambda given: self._try(call, module, copy_arguments(given)).outputs,
            rounded=lambda given: self._in_low_precision(call, given).outputs,
        )  # fmt: skip

    def _in_low_precision(self, call: Call, arguments: Arguments) -> _Trial:
        low = self.session.low
        module = low.model.get_submodule(call.module)
        with low.active(self.session.device):
            return self._try(call, module, low.convert(arguments, self.session.types.get(call)))

    def _perturbed(self, call: Call, module: nn.Module, arguments: Arguments) -> _Trial:
        perturbation = self.session.perturbation
        perturbation.restart()
        with perturbation.on_outputs(module):
            return self._try(call, module, perturbation.of(arguments))

    def _try(self, call: Call, module: nn.Module, arguments: Arguments) -> _Trial:
        choices, args, kwargs = Choices(), *arguments
        counts = {**self._tracer.counts, call.module: call.number}
        inside = trace_modules(module, choices, prefix=call.module, counts=counts, only=self.session.choosers)
        kept = kept_buffers(module, call.module, self.session.moving) if self.session.moving else nullcontext()
        try:
            with self._tracer.closed(), self.session.seeded(), kept, inside:
                return _Trial(find_real_tensors(module(*args, **kwargs)), choices.made)
        except FAILURES as error:
            return _Trial({}, choices.made, str(error).partition("\n")[0] or type(error).__name__)


@contextmanager
def reference_of(model: nn.Module) -> Iterator[nn.Module]:
    """The model in evaluation mode, or an FP32 copy if it is in another precision."""
    weights = [one.dtype for one in model.parameters() if one.is_floating_point()]
    held = [*weights, *(one.dtype for one in model.buffers() if one.is_floating_point())]
    if torch.float64 in weights or any(torch.finfo(dtype).bits < 32 for dtype in held):
        yield copy.deepcopy(model).float().eval()
        return
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
    if "use_cache" in inspect.signature(model.forward).parameters:
        kwargs.setdefault("use_cache", False)

    def place(tensor: Tensor) -> Tensor:
        return tensor.to(device, torch.float32 if tensor.is_floating_point() else tensor.dtype)

    placed: Arguments = map_tensors(place, (args, kwargs))
    return placed


class LowPrecisionPass(ModuleEvents):
    """Low-precision pass: stores the outputs of this window and the number formats of all arguments."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._running: list[Call] = []

    def run(self, arguments: Arguments) -> None:
        """Raises NumericsError: the model does not run in this precision."""
        low = self.session.low
        args, kwargs = low.convert(copy_arguments(arguments), None)
        kept = kept_buffers(low.model)
        try:
            with self.session.seeded(), kept as moving, trace_modules(low.model, self), low.active(self.session.device):
                low.model(*args, **kwargs)
        except FAILURES as error:
            place = str(self._running[-1]) if self._running else "the model"
            what: object = next(iter(str(error).splitlines()), error)
            raise NumericsError(
                f"the model does not run in {dtype_name(low.dtype)}: {what!r}",
                where=f"mode={low.mode}, in {place}",
                do="the other mode, or keep this module in fp32" if low.mode == AUTOCAST else f"mode={AUTOCAST}",
            ) from error
        self.session.moving = moving

    def before(self, call: Call, module: nn.Module, arguments: Arguments) -> None:
        """Record the arguments' number formats and non-finite values."""
        self._running.append(call)
        self.session.types[call] = types_of(arguments)
        for path, tensor in find_real_tensors(arguments).items():
            self._note_broken((call, f"in{path}"), tensor)

    def _note_broken(self, key: Key, tensor: Tensor) -> None:
        if tensor.is_floating_point() and not bool((finite := tensor.isfinite()).all()):
            self.session.broken[key] = ~finite

    def after(self, call: Call, module: nn.Module, output: Any) -> None:  # noqa: ANN401 - any output of a module
        """Store the outputs."""
        self._running.pop()
        for path, tensor in find_real_tensors(output).items():
            if is_choice(tensor):
                self.session.choosers.add(call.module)
                self.session.low_choices[call, path] = tensor.clone()
            elif tensor.is_floating_point():
                self._note_broken((call, path), tensor)
                self.session.keep((call, path), tensor)


class PerturbedPass(ModuleEvents):
    """FP32 pass with every module output off by one unit in the last place; measures the error floor."""

    def __init__(self, session: Session, draw: int) -> None:
        """`draw`: number of the series of coin tosses."""
        self.session, self.draw = session, draw
        self._alike = EqualChoiceRows()

    def run(self, arguments: Arguments) -> None:
        """One forward pass."""
        model, perturbation = self.session.reference, self.session.perturbation
        perturbation.restart(self.draw)
        args, kwargs = perturbation.of(copy_arguments(arguments))
        with self.session.seeded(), kept_buffers(model), perturbation.on_outputs(model), trace_modules(model, self):
            model(*args, **kwargs)

    def after(self, call: Call, module: nn.Module, output: Any) -> None:  # noqa: ANN401 - any output of a module
        """Compare with the reference; the largest distance of all draws is the floor."""
        session, tensors = self.session, find_real_tensors(output)
        for path, tensor in tensors.items():
            if is_choice(tensor) and (call, path) in session.choices:
                changed = self._alike.update(session.reference_choices[call, path], tensor)
                session.choices[call, path].floor = changed
        for path, tensor in tensors.items():
            found = session.outputs.get((call, path))
            if found is not None and (call, path) in session.waiting:
                distance = self._alike.distance(session.waiting[call, path].to(tensor.device), tensor)
                if distance is not None:
                    floor = session.floor(distance, chained=True)
                    found.propagated_floor = max(floor, found.propagated_floor or 0.0)


PRECISIONS = ("bfloat16", "float16")
# Larger values belong to attention masks, such as FP32's lowest number.
_MASK = 1e38
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
    memory_mib: int = 2048,
    seed: int = 0,
) -> Diff:
    """Compare a model in low precision with itself in FP32.

    Args:
        model: runs in evaluation mode; its mode and buffers are restored. If it is not in FP32, an FP32 copy runs.
        sample: keyword arguments, or positional ones; copied.
        precision: bfloat16 or float16; "bf16" and "fp16" are the same.
        mode: autocast, or cast: `model.to(precision)`.
        low: for mode=cast, a low-precision model made in another way (`from_pretrained(dtype=...)`).
        modules: globs on names of modules to compare; the model's own output always is.
        limits: on errors; None: the defaults.
        memory_mib: host memory for stored outputs.
        seed: of the perturbation, and of random numbers that the model draws.
    Raises:
        ConfigError: an invalid setting, or a ScriptModule.
        NumericsError: the model does not run in this precision.
    """
    started = perf_counter()
    target = find_format(precision)
    if dtype_name(target) not in PRECISIONS:
        raise ConfigError(f"precision={dtype_name(target)} is no precision models run in", where="argument precision",
                          do="precision=bfloat16, or float16")  # fmt: skip
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigError("the model is a ScriptModule, which refuses hooks", where="argument model",
                          do="compare the module that torch.jit was given")  # fmt: skip
    wanted = _select(model, modules)
    with reference_of(model) as reference, nullcontext() if low is None else _evaluated(low):
        tensors = chain(reference.parameters(), reference.buffers(), find_tensors(sample).values())
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        arguments = arguments_of(reference, sample, device)
        session = Session(
            reference, LowPrecision(reference, target, mode, low), Perturbation(target, seed), device, wanted,
            memory_mib * 2**20, Diff(dtype_name(target), mode, limits or DiffLimits()),
        )  # fmt: skip
        while session.begin_window():
            LowPrecisionPass(session).run(arguments)
            ReferencePass(session).run(arguments)
            for draw in range(DRAWS):
                PerturbedPass(session, draw).run(arguments)
        session.finish()
    session.diff.passes = session.windows * (2 + DRAWS)
    session.diff.seconds = perf_counter() - started
    return session.diff


def _select(model: nn.Module, patterns: Sequence[str]) -> frozenset[str]:
    names = [name for name, _ in model.named_modules()]
    chosen = {""}
    for pattern in patterns:
        fitting = fnmatch.filter(names, pattern)
        if not fitting:
            example = names[len(names) // 2] or "*"
            do = f"modules=['{example}'], or ['*'] for all"
            raise ConfigError(f"no module is called {pattern}", where="setting modules", do=do)
        chosen.update(fitting)
    return frozenset(chosen)
