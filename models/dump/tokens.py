"""Which token positions of a tensor are kept."""

from bisect import bisect_left
from dataclasses import dataclass

from torch import Tensor

from models.dump.config import DumpConfig
from models.dump.records import Placement


@dataclass(frozen=True)
class Part:
    """What a process holds of a tensor: its shape in all, where its own part begins, and which axis counts tokens."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    token_axis: int | None
    pieces: tuple[int, int] | None = None  # as `Placement` has it

    @classmethod
    def whole(cls, tensor: Tensor, token_axis: int | None) -> "Part":
        """All of it."""
        return cls(tuple(tensor.shape), (0,) * tensor.ndim, token_axis)

    @classmethod
    def of_axis(
        cls, tensor: Tensor, axis: int, index: int, parts: int, token_axis: int | None, pieces: int = 1
    ) -> "Part":
        """Part number `index` of `parts` equal ones along `axis`.

        With several pieces the axis holds so many things one after the other (gate and up), and a part has its share
        of each.
        """
        shape, offset = list(tensor.shape), [0] * tensor.ndim
        offset[axis], shape[axis] = index * shape[axis] // pieces, parts * shape[axis]
        return cls(tuple(shape), tuple(offset), token_axis, (axis, pieces) if pieces > 1 and parts > 1 else None)


def keep_tokens(tensor: Tensor, part: Part, config: DumpConfig) -> tuple[Tensor, Placement]:
    """The kept positions of a tensor, and where they lie among all positions that are kept of all parts.

    Positions are those of the whole sequence, also where a process holds a part of it.
    """
    axis = part.token_axis
    first, every, most = config.first_token, config.every_tokens, config.max_tokens
    if axis is None or (first, every, most) == (0, 1, None):
        return tensor, Placement(part.global_shape, part.offset, part.pieces)
    chosen = range(part.global_shape[axis])[first::every][:most]
    begin, end = part.offset[axis], part.offset[axis] + tensor.shape[axis]
    before, until = bisect_left(chosen, begin), bisect_left(chosen, end)
    mine = chosen[before:until]
    index = [slice(None)] * tensor.ndim
    index[axis] = slice(mine[0] - begin, mine[-1] - begin + 1, every) if mine else slice(0, 0)
    shape, offset = list(part.global_shape), list(part.offset)
    shape[axis], offset[axis] = len(chosen), before
    return tensor[tuple(index)], Placement(tuple(shape), tuple(offset), part.pieces, (first, every, len(chosen)))
