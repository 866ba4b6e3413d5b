"""FP32 against low precision: where a model departs from its reference, and which module is the reason.

    diff = auto_diff(model, {"input_ids": ids}, precision="bfloat16")
    print(diff.first, diff.verdict)

Each module is judged twice: by what arrives at its output when everything runs in low precision (propagated), and by
its own error when it alone does, on the FP32 inputs. Both are measured against the model's own response, in FP32, to
one unit in the last place: an error is no fault where the model makes as much of a rounding.

Outputs wait on the host, those of FP32 only until the other runs have come by. Where `memory_mib` is too small for all
of them, the model runs again for the next part.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from instruments.errors import ConfigError, NumericsError
from instruments.precision.calls import Arguments, Call, ModuleTracer, find_tensors, map_tensors, trace_modules
from instruments.precision.comparison import axis_ranges, find_format, measure_distance
from instruments.precision.findings import ChoiceDiff, Diff, OutputDiff
from instruments.precision.session import (
    AUTOCAST,
    FAILURES,
    AlikeRows,
    Choices,
    LowPrecision,
    Perturbation,
    Session,
    is_choice,
)
from instruments.precision.tensor_analysis import find_swamping, sums_up


@dataclass
class _Trial:
    """A module run again on the side, with the FP32 inputs: what it gave."""

    outputs: Mapping[str, Tensor]
    choices: Choices
    failure: str = ""


class ReferencePass:
    """All in FP32. Before a module runs, it is tried in low precision and perturbed; then the three are compared."""

    def __init__(self, session: Session, diff: Diff) -> None:
        """`diff` is where calls without tensors are noted."""
        self.session, self.diff = session, diff
        self._window = {call for call, _ in session.waiting}
        if session.windows == 1:  # modules that do nothing but choose
            self._window |= {call for call, _ in session.low_choices if call.module in session.wanted}
        self._alike = AlikeRows()
        self._trials: dict[Call, tuple[_Trial, _Trial]] = {}
        self._arguments: dict[Call, Arguments] = {}  # of modules that are running
        self._tracer: ModuleTracer

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One forward pass, and for every module and each of its ancestors one more in each of the two ways."""
        with self.session.seeded(), trace_modules(self.session.reference, self) as self._tracer:
            self.session.reference(*args, **kwargs)

    def before(self, call: Call, module: nn.Module, arguments: Arguments) -> None:
        """Try the module."""
        if call in self._window:
            self._trials[call] = self._in_low_precision(call, arguments), self._perturbed(call, module, arguments)
            self._arguments[call] = arguments

    def after(self, call: Call, module: nn.Module, output: Any) -> None:  # noqa: ANN401 - any output of a module
        """Compare, and let the reference wait for the perturbed run."""
        session = self.session
        session.order.setdefault(call, len(session.order))
        tensors = find_tensors(output)
        if not tensors and session.windows == 1:
            self.diff.silent.append(str(call))
        trials = self._trials.pop(call, None)
        swamped = self._swamping(call, module, output)
        for path, tensor in tensors.items():
            if is_choice(tensor):
                self._choose(call, path, tensor, trials)
        for path, tensor in tensors.items():
            if (call, path) in session.waiting and trials is not None:
                session.outputs[call, path] = self._compare(call, path, module, tensor, trials)
                session.outputs[call, path].swamped = swamped
                session.waiting[call, path] = tensor.to("cpu", copy=True)

    def _choose(self, call: Call, path: str, chosen: Tensor, trials: tuple[_Trial, _Trial] | None) -> None:
        session = self.session
        session.reference_choices[call, path] = chosen.clone()
        if (low := session.low_choices.get((call, path))) is None:
            return
        rows = ChoiceDiff(call, path, chosen.numel() // chosen.shape[-1], propagated=self._alike.update(chosen, low))
        own = trials[0].outputs.get(path) if trials else None
        rows.own = None if own is None else AlikeRows().update(chosen, own)
        session.choices.setdefault((call, path), rows)

    def _compare(
        self, call: Call, path: str, module: nn.Module, exact: Tensor, trials: tuple[_Trial, _Trial]
    ) -> OutputDiff:
        own, perturbed = trials
        found = OutputDiff(
            call, path, type(module).__name__, sum(1 for _ in module.modules()) - 1, tuple(exact.shape),
            ranges=axis_ranges(exact), own_failure=own.failure,
        )  # fmt: skip
        arrived = self.session.waiting[call, path].to(exact.device)
        found.dtype = str(arrived.dtype).removeprefix("torch.")
        if arrived.shape == exact.shape and self._alike.comparable(exact):
            found.propagated = measure_distance(exact, arrived, self._alike.of(exact))
            found.unaligned = measure_distance(exact, arrived).normalised_l2
        for trial, name in ((own, "own"), (perturbed, "own_floor")):
            tensor = trial.outputs.get(path)
            alike = AlikeRows.between(self.session.reference_choices, trial.choices.made)
            if tensor is not None and tensor.shape == exact.shape and alike.comparable(exact):
                distance = measure_distance(exact, tensor.to(exact.device), alike.of(exact))
                setattr(
                    found, name, distance if trial is own else self.session.floor(distance, chained=found.parts > 0)
                )
        return found

    def _swamping(self, call: Call, module: nn.Module, output: Any) -> str:  # noqa: ANN401 - any output of a module
        arguments = self._arguments.pop(call, None)
        if arguments is None or not sums_up(module, arguments, output):
            return ""

        def exact(given: Arguments) -> Mapping[str, Tensor]:
            return self._try(call, module, map_tensors(Tensor.clone, given)).outputs

        def rounded(given: Arguments) -> Mapping[str, Tensor]:
            return self._in_low_precision(call, given).outputs

        return find_swamping(arguments, self.session.low.low, exact, rounded)

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
        try:
            with self._tracer.closed(), self.session.seeded(), inside:
                return _Trial(find_tensors(module(*args, **kwargs)), choices)
        except FAILURES as error:
            return _Trial({}, choices, str(error).partition("\n")[0] or type(error).__name__)


@contextmanager
def reference_of(model: nn.Module) -> Iterator[nn.Module]:
    """The model itself in evaluation mode where it computes in FP32 already, else an FP32 copy of it."""
    held = [tensor for tensor in chain(model.parameters(), model.buffers()) if tensor.is_floating_point()]
    if any(torch.finfo(tensor.dtype).bits < 32 for tensor in held):
        yield copy.deepcopy(model).float().eval()
        return
    training = {module: module.training for module in model.modules()}
    try:
        yield model.eval()
    finally:
        for module, flag in training.items():
            module.training = flag


def device_of(model: nn.Module, sample: Any) -> torch.device:  # noqa: ANN401 - any arguments
    """Device of the model; without parameters, of the sample."""
    for tensor in chain(model.parameters(), model.buffers(), find_tensors(sample).values()):
        return tensor.device
    return torch.device("cpu")


def arguments_of(
    model: nn.Module, sample: Mapping[str, Any] | Sequence[Any] | Tensor, device: torch.device
) -> Arguments:
    """Positional and keyword arguments, floating-point tensors in FP32; no key-value cache, which a module fills."""
    if isinstance(sample, Tensor):
        sample = (sample,)
    args, kwargs = ((), dict(sample)) if isinstance(sample, Mapping) else (tuple(sample), {})
    if "use_cache" in inspect.signature(model.forward).parameters:
        kwargs.setdefault("use_cache", False)

    def place(tensor: Tensor) -> Tensor:
        return tensor.to(device, torch.float32 if tensor.is_floating_point() else tensor.dtype)

    placed: Arguments = map_tensors(place, (args, kwargs))
    return placed


class LowPass:
    """All in low precision: keeps the outputs of this window, and which number formats modules are given."""

    def __init__(self, session: Session, diff: Diff) -> None:
        """`diff` is where calls without tensors are noted."""
        self.session, self.diff = session, diff
        self._running: list[Call] = []

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises NumericsError: the model does not run in this precision."""
        low = self.session.low
        args, kwargs = low.convert((args, kwargs), None)
        try:
            with self.session.seeded(), trace_modules(low.model, self), low.active(self.session.device):
                low.model(*args, **kwargs)
        except FAILURES as error:
            place = str(self._running[-1]) if self._running else "the model"
            raise NumericsError(
                f"the model does not run in {low.low.name}: {str(error).splitlines()[0] if str(error) else error!r}",
                where=f"mode={low.mode}, in {place}",
                do="the other mode, or keep this module in fp32" if low.mode == AUTOCAST else f"mode={AUTOCAST}",
            ) from error

    def before(self, call: Call, module: nn.Module, arguments: Arguments) -> None:
        """Note what it is given."""
        self._running.append(call)
        self.session.types[call] = self.session.low.types_of(arguments)

    def after(self, call: Call, module: nn.Module, output: Any) -> None:  # noqa: ANN401 - any output of a module
        """Keep what it gives."""
        self._running.pop()
        for path, tensor in find_tensors(output).items():
            if is_choice(tensor):
                self.session.choosers.add(call.module)
                self.session.low_choices[call, path] = tensor.clone()
            elif tensor.is_floating_point():
                self.session.keep((call, path), tensor)


class PerturbedPass:
    """All in FP32, every tensor that a module returns off by one unit in the last place: how far that leads."""

    def __init__(self, session: Session, draw: int) -> None:
        """`draw` says which series of coins is thrown."""
        self.session, self.draw = session, draw
        self._alike = AlikeRows()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One forward pass."""
        session = self.session
        session.perturbation.restart(self.draw)
        args, kwargs = session.perturbation.of((args, kwargs))
        with (
            session.seeded(),
            session.perturbation.on_outputs(session.reference),
            trace_modules(session.reference, self),
        ):
            session.reference(*args, **kwargs)

    def before(self, call: Call, module: nn.Module, arguments: Arguments) -> None:
        """Nothing to do."""

    def after(self, call: Call, module: nn.Module, output: Any) -> None:  # noqa: ANN401 - any output of a module
        """Compare with the reference; of several draws the farthest counts."""
        tensors = find_tensors(output)
        for path, tensor in tensors.items():
            if is_choice(tensor) and (call, path) in self.session.choices:
                changed = self._alike.update(self.session.reference_choices[call, path], tensor)
                self.session.choices[call, path].floor = changed
        for path, tensor in tensors.items():
            exact = self.session.waiting.get((call, path))
            found = self.session.outputs.get((call, path))
            alike = exact is not None and exact.shape == tensor.shape and self._alike.comparable(tensor)
            if exact is not None and found is not None and alike:
                exact = exact.to(tensor.device)
                floor = self.session.floor(measure_distance(exact, tensor, self._alike.of(tensor)), chained=True)
                found.propagated_floor = max(floor, found.propagated_floor or 0.0)


PRECISIONS = ("bfloat16", "float16")
# Perturbed runs; one alone may meet the border between two discrete choices by luck, or miss it.
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
    memory_mib: int = 2048,
    seed: int = 0,
) -> Diff:
    """Compare a model in low precision with itself in FP32.

    Args:
        model: any; it runs in evaluation mode and is left as it was. Of one in low precision an FP32 copy is made.
        sample: keyword arguments, or positional ones.
        precision: bfloat16 or float16.
        mode: autocast, or cast: `model.to(precision)`.
        low: with mode=cast, the model in low precision where it is made otherwise (`from_pretrained(dtype=...)`).
        modules: globs on the names of modules that are compared.
        memory_mib: of host memory for outputs that wait.
        seed: of the perturbation.
    Raises:
        ConfigError: a setting without meaning.
        NumericsError: the model does not run in this precision.
    """
    started = perf_counter()
    target = find_format(precision)
    if target.name not in PRECISIONS:
        raise ConfigError(f"precision={target.name} is no precision models run in", where="argument precision",
                          do="precision=bfloat16, or float16")  # fmt: skip
    wanted = _select(model, modules)
    with reference_of(model) as reference:
        device = device_of(reference, sample)
        args, kwargs = arguments_of(reference, sample, device)
        session = Session(
            reference, LowPrecision(reference, target, mode, low), Perturbation(target, seed), device, wanted,
            budget=memory_mib * 2**20,
        )  # fmt: skip
        diff = Diff(target.name, mode)
        while session.begin_window():
            LowPass(session, diff).run(args, kwargs)
            ReferencePass(session, diff).run(args, kwargs)
            for draw in range(DRAWS):
                PerturbedPass(session, draw).run(args, kwargs)
        diff.passes = session.windows * (2 + DRAWS)
        session.finish(diff)
    diff.seconds = perf_counter() - started
    return diff


def _select(model: nn.Module, patterns: Sequence[str]) -> frozenset[str]:
    names = [name for name, _ in model.named_modules()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"no module is called {pattern}",
                where="setting modules",
                do=f"modules=['{names[len(names) // 2] or '*'}'], or ['*'] for all",
            )
    return frozenset(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))
