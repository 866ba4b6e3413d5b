"""Which call of a module it is, also when its layer is run again for the backward pass."""

from collections import Counter, defaultdict
from dataclasses import dataclass

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from models.dump.watched import Watched


@dataclass(frozen=True)
class Turn:
    """A place in the order of calls."""

    microbatch: int
    number: int  # among the module's calls in the microbatch


class CallOrder:
    """The calls of one step, in the order of the forward passes."""

    def __init__(self) -> None:
        """None so far."""
        self._order: list[tuple[Watched, Turn, TensorWeakRef]] = []
        self._numbers: Counter[tuple[Watched, int]] = Counter()
        self._open: defaultdict[Watched, list[int]] = defaultdict(list)  # positions that were not run again yet
        self._latest = -2  # position that was run again last

    def __bool__(self) -> bool:
        """Whether anything was called."""
        return bool(self._order)

    def begin(self, watched: Watched, microbatch: int, first_input: Tensor) -> Turn:
        """A call in a forward pass."""
        turn = Turn(microbatch, self._numbers[watched, microbatch])
        self._numbers[watched, microbatch] += 1
        self._open[watched].append(len(self._order))
        self._order.append((watched, turn, TensorWeakRef(first_input)))
        return turn

    def repeat(self, watched: Watched, first_input: Tensor) -> Turn | None:
        """A call that is a repetition: of which one; None where none is left.

        A piece that is run again begins with the very tensor of the first time, and goes on in its old order: after
        the call repeated last comes the next. Where neither helps, older calls come first.
        """
        left = self._open[watched]
        if not left:
            return None
        likely = [one for one in left if _is_same(self._order[one][2](), first_input)] or left
        position = self._latest + 1 if self._latest + 1 in likely else likely[0]
        left.remove(position)
        self._latest = position
        return self._order[position][1]


def _is_same(kept: Tensor | None, tensor: Tensor) -> bool:
    """Whether both are the same memory; as long as the first lives, nothing else can be there."""
    return kept is not None and kept.data_ptr() == tensor.data_ptr() and kept.shape == tensor.shape
