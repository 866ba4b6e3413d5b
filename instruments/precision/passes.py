"""The forward passes of auto_diff: in low precision; in FP32, with each module run again alone; and perturbed."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from instruments.distance import measure_distance
from instruments.dtypes import dtype_name
from instruments.errors import NumericsError
from instruments.hooks import Call, ModuleEvents, ModuleTracer, trace_modules
from instruments.precision.comparison import axis_ranges, find_swamping, rows_with_error, sums_up
from instruments.precision.findings import ChoiceDiff, OutputDiff
from instruments.precision.session import AUTOCAST, EqualChoiceRows, Key, Session, is_choice, kept_buffers, types_of
from instruments.tensors import Arguments, copy_arguments, find_real_tensors

# Errors that a module may raise in a number format that it does not support.
_FAILURES = (RuntimeError, TypeError, ValueError, AssertionError)
# Larger values belong to attention masks, such as FP32's lowest number.
_MASK = 1e38


class LowPrecisionPass(ModuleEvents):
    """Low-precision pass: stores the outputs of this window and the number formats of all arguments."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._running: list[Call] = []

    def run(self, arguments: Arguments) -> None:
        """Raises NumericsError: the model does not run in this precision."""
        session, low = self.session, self.session.low
        args, kwargs = low.convert(copy_arguments(arguments), None)
        tracing = trace_modules(low.model, self)
        try:
            with session.seeded(), kept_buffers(low.model), tracing, low.active(session.device):
                low.model(*args, **kwargs)
        except _FAILURES as error:
            place = str(self._running[-1]) if self._running else "the model"
            what: object = next(iter(str(error).splitlines()), error)
            what = f"the model does not run in {session.diff.precision}: {what!r}"
            do = "the other mode, or keep this module in fp32" if low.mode == AUTOCAST else f"mode={AUTOCAST}"
            raise NumericsError(what, where=f"mode={low.mode}, in {place}", do=do) from error

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
                self.session.low_choices[call, path] = tensor.clone()
            elif tensor.is_floating_point():
                self._note_broken((call, path), tensor)
                self.session.keep((call, path), tensor)


class _Choices(ModuleEvents):
    """Collects the integer outputs of a pass, by call and path."""

    def __init__(self) -> None:
        self.made: dict[Key, Tensor] = {}

    def after(self, call: Call, module: nn.Module, output: Any) -> None:  # noqa: ANN401 - any output of a module
        """Store the choices."""
        found = find_real_tensors(output).items()
        self.made |= {(call, path): tensor.clone() for path, tensor in found if is_choice(tensor)}


class _Trial(NamedTuple):
    """Result of running one module again, separately, on the FP32 inputs."""

    outputs: Mapping[str, Tensor]
    choices: Mapping[Key, Tensor]
    failure: str = ""


class _Trials(NamedTuple):
    """Both trials of a call; the arguments are kept for further ones."""

    arguments: Arguments
    low: _Trial
    perturbed: _Trial


class ReferencePass(ModuleEvents):
    """FP32 pass: each module first runs in low precision and perturbed; then its three outputs are compared."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._window = {call for call, _ in session.waiting}
        if session.windows == 1:  # modules whose only outputs are choices
            self._window |= {call for call, _ in session.low_choices if call.module in session.wanted}
        self._alike = EqualChoiceRows()
        self._trials: dict[Call, _Trials] = {}  # of modules that are running
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
            outer, last = self._running[-1], self._last or "the start"
            self._overflows[outer] = f"between {last} and {call}, in the forward of {outer}: {lost}"
        self._running.append(call)
        if call in self._window:
            low = _Trial({}, {}) if lost else self._in_low_precision(call, arguments)
            self._trials[call] = _Trials(arguments, low, self._perturbed(call, module, arguments))

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
        session, tensors = self.session, find_real_tensors(output)
        session.order.setdefault(call, len(session.order))
        self._last = self._running.pop()
        self._overflowed |= any(
            (call, path) in session.broken and bool(tensor.isfinite().all()) for path, tensor in tensors.items()
        )
        overflow = self._overflows.pop(call, "")
        if session.windows == 1:
            session.diff.silent += [str(call)] * (not tensors)
            session.diff.overflows += [overflow] * bool(overflow)
        trials = self._trials.pop(call, None)
        for path, tensor in tensors.items():
            if is_choice(tensor):
                self._choose((call, path), tensor, trials.low.outputs.get(path) if trials else None)
        if trials is None:
            return
        swamped = ""
        if sums_up(module, trials.arguments, output):
            swamped = find_swamping(
                trials.arguments, session.low.dtype,
                exact=lambda given: self._try(call, module, copy_arguments(given)).outputs,
                rounded=lambda given: self._in_low_precision(call, given).outputs,
            )  # fmt: skip
        for path, tensor in tensors.items():
            if (call, path) in session.waiting:
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

    def _compare(self, call: Call, path: str, module: nn.Module, exact: Tensor, trials: _Trials) -> OutputDiff:
        session, arrived = self.session, self.session.waiting[call, path]
        found = OutputDiff(
            call, path, type(module).__name__, sum(1 for _ in module.modules()) - 1, tuple(exact.shape),
            dtype=dtype_name(arrived.dtype), ranges=axis_ranges(exact), own_failure=trials.low.failure,
            limits=session.diff.limits,
        )  # fmt: skip
        found.propagated = self._alike.distance(exact, arrived.to(exact.device))
        if found.propagated is not None:
            found.unaligned = measure_distance(exact, arrived.to(exact.device)).normalised_l2
        found.own, floor = (
            EqualChoiceRows(session.reference_choices, trial.choices).distance(exact, trial.outputs.get(path))
            for trial in (trials.low, trials.perturbed)
        )
        if floor is not None:
            found.own_floor = session.floor(floor, chained=found.parts > 0)
            if exact.ndim > 1 and exact.numel():
                found.floor_rows = rows_with_error(exact, trials.perturbed.outputs[path])
        return found

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
        session, choices, (args, kwargs) = self.session, _Choices(), arguments
        counts = {**self._tracer.counts, call.module: call.number}
        inside = trace_modules(module, choices, prefix=call.module, counts=counts)
        try:
            with self._tracer.closed(), session.seeded(), kept_buffers(module), inside:
                return _Trial(find_real_tensors(module(*args, **kwargs)), choices.made)
        except _FAILURES as error:
            return _Trial({}, choices.made, str(error).partition("\n")[0] or type(error).__name__)


class PerturbedPass(ModuleEvents):
    """FP32 pass with every module output off by one unit in the last place; measures the error floor."""

    def __init__(self, session: Session, draw: int) -> None:
        """`draw`: number of the series of coin tosses."""
        self.session, self.draw = session, draw
        self._alike = EqualChoiceRows()

    def run(self, arguments: Arguments) -> None:
        """One forward pass."""
        session, model, perturbation = self.session, self.session.reference, self.session.perturbation
        perturbation.restart(self.draw)
        args, kwargs = perturbation.of(copy_arguments(arguments))
        tracing = trace_modules(model, self)
        with session.seeded(), kept_buffers(model), perturbation.on_outputs(model), tracing:
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
