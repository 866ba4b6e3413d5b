"""The FP32 reference run, in which every module is tried on the side."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from models.numerics.diff.calls import Arguments, Call, Ear, listen
from models.numerics.diff.choices import AlikeRows, Choices, is_choice
from models.numerics.diff.comparison import measure_distance
from models.numerics.diff.drowned import find_drowned, sums_up
from models.numerics.diff.findings import ChoiceDiff, Diff, OutputDiff
from models.numerics.diff.low_precision import FAILURES
from models.numerics.diff.session import Session
from models.numerics.nested import find_tensors, map_tensors
from models.numerics.ranges import axis_ranges


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
        self._ear: Ear

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One forward pass, and for every module and each of its ancestors one more in each of the two ways."""
        with self.session.seeded(), listen(self.session.reference, self) as self._ear:
            self.session.reference(*args, **kwargs)

    def before(self, call: Call, module: nn.Module, arguments: Arguments) -> None:
        """Try the module."""
        if call in self._window:
            self._trials[call] = self._in_low_precision(call, arguments), self._perturbed(call, module, arguments)
            self._arguments[call] = arguments

    def after(self, call: Call, module: nn.Module, output: Any) -> None:  # noqa: ANN401 - whatever it returns
        """Compare, and let the reference wait for the perturbed run."""
        session = self.session
        session.order.setdefault(call, len(session.order))
        tensors = find_tensors(output)
        if not tensors and session.windows == 1:
            self.diff.silent.append(str(call))
        trials = self._trials.pop(call, None)
        drowned = self._drowned(call, module, output)
        for path, tensor in tensors.items():
            if is_choice(tensor):
                self._choose(call, path, tensor, trials)
        for path, tensor in tensors.items():
            if (call, path) in session.waiting and trials is not None:
                session.outputs[call, path] = self._compare(call, path, module, tensor, trials)
                session.outputs[call, path].drowned = drowned
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

    def _drowned(self, call: Call, module: nn.Module, output: Any) -> str:  # noqa: ANN401 - whatever it returns
        arguments = self._arguments.pop(call, None)
        if arguments is None or not sums_up(module, arguments, output):
            return ""

        def exact(given: Arguments) -> Mapping[str, Tensor]:
            return self._try(call, module, map_tensors(Tensor.clone, given)).outputs

        def rounded(given: Arguments) -> Mapping[str, Tensor]:
            return self._in_low_precision(call, given).outputs

        return find_drowned(arguments, self.session.low.low, exact, rounded)

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
        counts = {**self._ear.counts, call.module: call.number}
        inside = listen(module, choices, prefix=call.module, counts=counts, only=self.session.choosers)
        try:
            with self._ear.closed(), self.session.seeded(), inside:
                return _Trial(find_tensors(module(*args, **kwargs)), choices)
        except FAILURES as error:
            return _Trial({}, choices, str(error).partition("\n")[0] or type(error).__name__)
