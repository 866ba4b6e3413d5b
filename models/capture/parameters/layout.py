"""How the numbers of all parameters stand beside one another in a record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from models.capture.records import WatchedParameter


@dataclass(frozen=True)
class Layout:
    """Blocks of all parameters one after the other, and which parameter each belongs to."""

    parameters: Sequence[WatchedParameter]
    inputs: Tensor  # (I,) parameter of each input block
    outputs: Tensor  # (O,) parameter of each output block
    read: Tensor  # (I + embeddings,) parameter of each block of an activation: a look-up has one

    @classmethod
    def of(cls, parameters: Sequence[WatchedParameter]) -> "Layout":
        """From the parameter table."""
        order = torch.arange(len(parameters))
        inputs = torch.tensor([parameter.in_blocks for parameter in parameters])
        outputs = torch.tensor([parameter.out_blocks for parameter in parameters])
        read = inputs.clamp(min=1)
        return cls(parameters, *(order.repeat_interleave(counts) for counts in (inputs, outputs, read)))

    def join(self, pieces: Mapping[int, Tensor], owners: Tensor, samples: int) -> Float[Tensor, "B n"]:
        """Blocks of every parameter in order, NaN for one that was not measured."""
        counts = owners.bincount(minlength=len(self.parameters)).tolist()
        return torch.cat(
            [
                pieces[index] if index in pieces else torch.full((samples, count), torch.nan)
                for index, count in enumerate(counts)
            ],
            dim=1,
        )

    def totals(self, squares_Bn: Float[Tensor, "B n"], owners: Tensor) -> Float[Tensor, "B P"]:
        """Sum of every parameter's blocks."""
        return squares_Bn.new_zeros(len(squares_Bn), len(self.parameters)).index_add_(1, owners, squares_Bn)
