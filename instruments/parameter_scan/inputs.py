"""Squared norms of inputs, and of the gradients of embeddings, which may be tied to the output embedding."""

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from instruments.gradients import column_squares, sample_grams, split_blocks
from instruments.shapes import Float, Int
from instruments.tensors import version_of


def token_block_squares(x_BTN: Float[Tensor, "B T N"], width: int) -> Float[Tensor, "B T n"]:
    """‖x_t[block]‖² in fp32 per token and block of `width` columns; the last block may be narrower."""
    norms = [vector_norm(part, dim=-1, dtype=torch.float32) for part in split_blocks(narrow(x_BTN), width)]
    squares: Tensor = (norms[0] if len(norms) == 1 else torch.cat(norms, dim=-1)).square_()
    return squares


class InputSquares:
    """Squared norms and Gram matrix of one input (B, T, I); computed when first needed."""

    def __init__(self, source: Tensor, x_BTI: Tensor, mask_BT: Tensor | None, width: int) -> None:
        """`source` is the module's input, `x_BTI` the same by samples; tokens outside of the mask have no norm."""
        self.x_BTI, self.mask_BT = x_BTI, mask_BT
        # The source is kept so that its memory is not reused.
        self._source, self._version, self._width = source, version_of(source), width
        self._joined: tuple[InputSquares, slice] | None = None

    @property
    def changed(self) -> bool:
        """Whether someone has changed the input since."""
        return self._version != version_of(self._source)

    @property
    def kind(self) -> Hashable:
        """Equal for inputs that can be joined along their samples."""
        x_BTI, masked = self.x_BTI, self.mask_BT is not None
        return x_BTI.shape, x_BTI.dtype, x_BTI.device, masked, self._width

    @cached_property
    def block_squares_Bi(self) -> Tensor:
        """Σ over tokens of the squares of every block of columns."""
        squares_BTi = token_block_squares(self.x_BTI, self._width)
        if self.mask_BT is not None:
            squares_BTi = squares_BTi.masked_fill(~self.mask_BT.unsqueeze(2), 0)
        return squares_BTi.sum(1)

    @cached_property
    def gram_BTT(self) -> Tensor:
        """XXᵀ of every sample, fp32."""
        if self._joined is None:
            return sample_grams(self.x_BTI)
        joined, rows = self._joined
        return joined.gram_BTT[rows]

    def is_of(self, other: Tensor, width: int) -> bool:
        """Whether `other` is the same memory with the same layout and values, and has blocks of the same width."""
        if width != self._width or self._version is None or self._version != version_of(other):
            return False
        mine, its = (
            (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            for tensor in (self._source, other)
        )
        return mine == its


def join_inputs(inputs: Sequence[InputSquares]) -> None:
    """Let inputs of equal `kind` compute their squares and Gram matrices together; of a single one nothing changes."""
    if len(inputs) == 1:
        return
    first, x_BTI = inputs[0], torch.cat([one.x_BTI for one in inputs])
    masks = [one.mask_BT for one in inputs if one.mask_BT is not None]
    joined = InputSquares(x_BTI, x_BTI, torch.cat(masks) if masks else None, first._width)
    for number, one in enumerate(inputs):
        rows = slice(number * len(first.x_BTI), (number + 1) * len(first.x_BTI))
        one.block_squares_Bi, one._joined = joined.block_squares_Bi[rows], (joined, rows)


class HeadPart(NamedTuple):
    """The output embedding's part of a tied gradient, kept until the backward pass reaches the input embedding."""

    x_BSD: Tensor  # input of the head; S may be less than T
    at_inputs_BTS: Tensor  # G[s, id_t]: gradient of the logits at the looked-up tokens
    columns_BD: Tensor  # ‖B[:, d]‖²

    def to(self, device: torch.device) -> "HeadPart":
        """The same on another device: the two embeddings may be on different ones."""
        return HeadPart(*(tensor.to(device) for tensor in self))


def head_part(
    x_BSD: Float[Tensor, "B S D"], grad_BSV: Float[Tensor, "B S V"], ids_BT: Int[Tensor, "B T"], *, gram: bool
) -> HeadPart:
    """Reduce the logits' gradient to the terms needed for the sum of both uses."""
    at_inputs = grad_BSV.gather(2, ids_BT.unsqueeze(1).expand(-1, grad_BSV.shape[1], -1)).mT.float()
    gram_BTT = sample_grams(grad_BSV) if gram else None
    return HeadPart(x_BSD, at_inputs, column_squares(x_BSD, grad_BSV, gram=gram, gram_BTT=gram_BTT))


def lookup_columns(ids_BT: Int[Tensor, "B T"], delta_BTD: Float[Tensor, "B T D"]) -> Float[Tensor, "B D"]:
    """‖A[:, d]‖² per sample: gradients of equal tokens are added before squaring.

    Sorting groups equal tokens without asking the device for their number.
    """
    sorted_BT, order_BT = ids_BT.sort(dim=1)
    row_BT = torch.nn.functional.pad((sorted_BT[:, 1:] != sorted_BT[:, :-1]).long(), (1, 0)).cumsum(1)
    # Samples are stacked in one tall matrix.
    row_BT = row_BT + torch.arange(len(row_BT), device=row_BT.device).unsqueeze(1) * row_BT.shape[1]
    ordered = delta_BTD.gather(1, order_BT.unsqueeze(2).expand_as(delta_BTD)).float()
    sums = torch.zeros_like(ordered).flatten(0, 1).index_add_(0, row_BT.flatten(), ordered.flatten(0, 1))
    columns_BD: Tensor = sums.square_().view_as(ordered).sum(1)
    return columns_BD


def embedding_columns(
    ids_BT: Int[Tensor, "B T"], delta_BTD: Float[Tensor, "B T D"], head: HeadPart | None
) -> Float[Tensor, "B D"]:
    """‖∇W[:, d]‖² of an embedding's weight, including its use by a tied output embedding `head`.

    `delta_BTD` is the gradient of the rows looked up; zero for tokens whose row is not trained (padding_idx).
    Numerics: fp32; squares that rounding makes negative become 0.
    """
    columns_BD = lookup_columns(ids_BT, delta_BTD)
    if head is None:
        return columns_BD
    # B_{id_t}: the row of the output embedding's gradient for every looked-up token.
    sent_back_BTD = head.at_inputs_BTS @ head.x_BSD.float()
    cross_BD = sent_back_BTD.mul_(delta_BTD).sum(1)
    return columns_BD.add_(head.columns_BD).add_(cross_BD, alpha=2).clamp_min_(0)


def narrow(tensor: Tensor) -> Tensor:
    """float64 as float32, in which all norms are computed; other formats as they are."""
    return tensor.float() if tensor.dtype == torch.float64 else tensor
