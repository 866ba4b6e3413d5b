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
import fnmatch
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    find_tensors,
    map_tensors,
    trace_modules,
)
from instruments.precision.comparison import axis_ranges, find_format, measure_distance, name_of
from instruments.precision.findings import ChoiceDiff, Diff, OutputDiff
from instruments.precision.session import (
    AUTOCAST,
    FAILURES,
    AlikeRows,
    Choices,
    Key,
    LowPrecision,
    Perturbation,
    Session,
    is_choice,
    types_of,
)
from instruments.precision.tensor_analysis import find_swamping, sums_up


class _Trial(NamedTuple):
    """A module run again on the side, with the FP32 inputs: what it gave."""

    outputs: Mapping[str, Tensor]
    choices: Mapping[Key, Tensor]
    failure: str = ""


class ReferencePass(ModuleEvents):
    """All in FP32. Before a module runs, it is tried in low precision and perturbed; then the three are compared."""

    def __init__(self, session: Session) -> None:
        """What is compared in this window."""
        self.session = session
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
            session.diff.silent.append(str(call))
        trials = self._trials.pop(call, None)
        swamped = self._swamping(call, module, output)
        for path, tensor in tensors.items():
            if is_choice(tensor):
                self._choose((call, path), tensor, trials[0].outputs.get(path) if trials else None)
        for path, tensor in tensors.items():
            if (call, path) in session.waiting and trials is not None:
                found = self._compare(call, path, module, tensor, trials)
                found.swamped = swamped
                session.outputs[call, path] = found
                session.waiting[call, path] = tensor.to("cpu", copy=True)

    def _choose(self, key: Key, chosen: Tensor, own: Tensor | None) -> None:
        session = self.session
        session.reference_choices[key] = chosen.clone()
        if key in session.low_choices:
            found = ChoiceDiff(*key, chosen.numel() // chosen.shape[-1])
            found.propagated = self._alike.update(chosen, session.low_choices[key])
            found.own = None if own is None else AlikeRows().update(chosen, own)
            session.choices.setdefault(key, found)

    def _compare(
        self, call: Call, path: str, module: nn.Module, exact: Tensor, trials: tuple[_Trial, _Trial]
    ) -> OutputDiff:
        arrived, (own, perturbed) = self.session.waiting[call, path], trials
        found = OutputDiff(
            call, path, type(module).__name__, sum(1 for _ in module.modules()) - 1, tuple(exact.shape),
            dtype=name_of(arrived.dtype), ranges=axis_ranges(exact), own_failure=own.failure,
        )  # fmt: skip
        found.propagated = self._alike.distance(exact, arrived.to(exact.device))
        if found.propagated is not None:
            found.unaligned = measure_distance(exact, arrived.to(exact.device)).normalised_l2
        found.own, floor = (
            AlikeRows(self.session.reference_choices, trial.choices).distance(exact, trial.outputs.get(path))
            for trial in (own, perturbed)
        )
        found.own_floor = None if floor is None else self.session.floor(floor, chained=found.parts > 0)
        return found

    def _swamping(self, call: Call, module: nn.Module, output: Any) -> str:  # noqa: ANN401 - any output of a module
        arguments = self._arguments.pop(call, None)
        if arguments is None or not sums_up(module, arguments, output):
            return ""

        return find_swamping(
            arguments, self.session.low.dtype,
            exact=lambda given: self._try(call, module, map_tensors(Tensor.clone, given)).outputs,
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
        try:
            with self._tracer.closed(), self.session.seeded(), inside:
                return _Trial(find_tensors(module(*args, **kwargs)), choices.made)
        except FAILURES as error:
            return _Trial({}, choices.made, str(error).partition("\n")[0] or type(error).__name__)


@contextmanager
def reference_of(model: nn.Module) -> Iterator[nn.Module]:
    """The model itself in evaluation mode where it computes in FP32 already, else an FP32 copy of it."""
    held = [tensor for tensor in chain(model.parameters(), model.buffers()) if tensor.is_floating_point()]
    if any(torch.finfo(tensor.dtype).bits < 32 for tensor in held):
        yield copy.deepcopy(model).float().eval()
        return
    training = [module for module in model.modules() if module.training]
    try:
        yield model.eval()
    finally:
        for module in training:
            module.training = True


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


class LowPass(ModuleEvents):
    """All in low precision: keeps the outputs of this window, and which number formats modules are given."""

    def __init__(self, session: Session) -> None:
        """Nothing runs yet."""
        self.session = session
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
            what: object = next(iter(str(error).splitlines()), error)
            raise NumericsError(
                f"the model does not run in {name_of(low.dtype)}: {what!r}",
                where=f"mode={low.mode}, in {place}",
                do="the other mode, or keep this module in fp32" if low.mode == AUTOCAST else f"mode={AUTOCAST}",
            ) from error

    def before(self, call: Call, module: nn.Module, arguments: Arguments) -> None:
        """Note what it is given."""
        self._running.append(call)
        self.session.types[call] = types_of(arguments)

    def after(self, call: Call, module: nn.Module, output: Any) -> None:  # noqa: ANN401 - any output of a module
        """Keep what it gives."""
        self._running.pop()
        for path, tensor in find_tensors(output).items():
            if is_choice(tensor):
                self.session.choosers.add(call.module)
                self.session.low_choices[call, path] = tensor.clone()
            elif tensor.is_floating_point():
                self.session.keep((call, path), tensor)


class PerturbedPass(ModuleEvents):
    """All in FP32, every tensor that a module returns off by one unit in the last place: how far that leads."""

    def __init__(self, session: Session, draw: int) -> None:
        """`draw` says which series of coins is thrown."""
        self.session, self.draw = session, draw
        self._alike = AlikeRows()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One forward pass."""
        model, perturbation = self.session.reference, self.session.perturbation
        perturbation.restart(self.draw)
        args, kwargs = perturbation.of((args, kwargs))
        with self.session.seeded(), perturbation.on_outputs(model), trace_modules(model, self):
            model(*args, **kwargs)

    def after(self, call: Call, module: nn.Module, output: Any) -> None:  # noqa: ANN401 - any output of a module
        """Compare with the reference; of several draws the farthest counts."""
        session, tensors = self.session, find_tensors(output)
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
    if name_of(target) not in PRECISIONS:
        raise ConfigError(f"precision={name_of(target)} is no precision models run in", where="argument precision",
                          do="precision=bfloat16, or float16")  # fmt: skip
    wanted = _select(model, modules)
    with reference_of(model) as reference:
        tensors = chain(reference.parameters(), reference.buffers(), find_tensors(sample).values())
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        args, kwargs = arguments_of(reference, sample, device)
        session = Session(
            reference, LowPrecision(reference, target, mode, low), Perturbation(target, seed), device, wanted,
            memory_mib * 2**20, Diff(name_of(target), mode),
        )  # fmt: skip
        while session.begin_window():
            LowPass(session).run(args, kwargs)
            ReferencePass(session).run(args, kwargs)
            for draw in range(DRAWS):
                PerturbedPass(session, draw).run(args, kwargs)
        session.finish()
    session.diff.passes = session.windows * (2 + DRAWS)
    session.diff.seconds = perf_counter() - started
    return session.diff


def _select(model: nn.Module, patterns: Sequence[str]) -> frozenset[str]:
    names = [name for name, _ in model.named_modules()]
    chosen: set[str] = set()
    for pattern in patterns:
        fitting = fnmatch.filter(names, pattern)
        if not fitting:
            example = names[len(names) // 2] or "*"
            do = f"modules=['{example}'], or ['*'] for all"
            raise ConfigError(f"no module is called {pattern}", where="setting modules", do=do)
        chosen.update(fitting)
    return frozenset(chosen)
