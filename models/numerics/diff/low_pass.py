"""The run in low precision, from end to end."""

from typing import Any

from torch import nn

from models.errors import NumericsError
from models.numerics.diff.calls import Arguments, Call, listen
from models.numerics.diff.choices import is_choice
from models.numerics.diff.findings import Diff
from models.numerics.diff.low_precision import AUTOCAST, FAILURES
from models.numerics.diff.session import Session
from models.numerics.nested import find_tensors


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
            with self.session.seeded(), listen(low.model, self), low.active(self.session.device):
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

    def after(self, call: Call, module: nn.Module, output: Any) -> None:  # noqa: ANN401 - whatever it returns
        """Keep what it gives."""
        self._running.pop()
        for path, tensor in find_tensors(output).items():
            if is_choice(tensor):
                self.session.choosers.add(call.module)
                self.session.low_choices[call, path] = tensor.clone()
            elif tensor.is_floating_point():
                self.session.keep((call, path), tensor)
