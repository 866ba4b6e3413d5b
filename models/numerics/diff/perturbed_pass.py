"""The run in FP32 that is off by one unit in the last place, from end to end."""

from typing import Any

from torch import nn

from models.numerics.diff.calls import Arguments, Call, listen
from models.numerics.diff.choices import AlikeRows, is_choice
from models.numerics.diff.comparison import measure_distance
from models.numerics.diff.session import Session
from models.numerics.nested import find_tensors


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
        with session.seeded(), session.perturbation.on_outputs(session.reference), listen(session.reference, self):
            session.reference(*args, **kwargs)

    def before(self, call: Call, module: nn.Module, arguments: Arguments) -> None:
        """Nothing to do."""

    def after(self, call: Call, module: nn.Module, output: Any) -> None:  # noqa: ANN401 - whatever it returns
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
