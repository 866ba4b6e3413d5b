"""What a Linear's input alone contributes: computed once for all who read the same input (q, k, v; gate, up)."""

import torch
from torch import Tensor

from models.capture.gradient_norms import gram_matrix
from models.capture.parameters.blocks import token_block_squares
from models.errors import ConfigError


class InputSquares:
    """Norms and Gram matrix of one input (B, T, I).

    Args:
        source: the tensor as the module got it, kept so that its memory cannot become another's meanwhile.
        x_BTI: the same with the samples apart, on the device of the gradients.
        mask_BT: True at tokens; None where all are.
        width: of a block.
    """

    def __init__(self, source: Tensor, x_BTI: Tensor, mask_BT: Tensor | None, width: int) -> None:
        """Sum the squares; the Gram matrix waits until it is asked for."""
        self.source, self.x_BTI = source, x_BTI
        squares_BTi = token_block_squares(x_BTI, width)
        self.token_squares_BT = squares_BTi.sum(2)
        if mask_BT is not None:
            squares_BTi = squares_BTi.masked_fill(~mask_BT.unsqueeze(2), 0)
        self.block_squares_Bi = squares_BTi.sum(1)
        self._gram: Tensor | None = None

    def gram(self) -> Tensor:
        """XXᵀ of every sample, fp32."""
        if self._gram is None:
            self._gram = gram_matrix(self.x_BTI)
        return self._gram

    def is_of(self, other: Tensor) -> bool:
        """Whether `other` is the very same memory read in the same way."""
        mine = self.source
        return (
            mine.data_ptr() == other.data_ptr()
            and mine.shape == other.shape
            and mine.stride() == other.stride()
            and mine.dtype == other.dtype
            and mine.device == other.device
        )


def split_samples(tensor: Tensor, samples: int, length: int, name: str) -> Tensor:
    """(B, T, N) from what a module was given: that, or the tokens of all samples in one row.

    Raises:
        ConfigError: the samples cannot be told apart.
    """
    if tensor.ndim == 3 and tensor.shape[0] == samples and tensor.shape[1] <= length:
        return tensor
    if tensor.ndim == 2 and tensor.shape[0] == samples * length:
        return tensor.view(samples, length, -1)
    raise ConfigError(
        f"{name} was given a tensor of shape {tuple(tensor.shape)}; expected {samples} samples of {length} positions",
        where="ParameterTensorScanner",
        do="leave it out: patterns=[...]",
    )


def last_positions(mask_BT: Tensor | None, length: int, device: torch.device) -> Tensor | None:
    """The mask of a module that saw the last `length` positions only, as the output embedding may."""
    return None if mask_BT is None else mask_BT[:, -length:].to(device, non_blocking=True)
