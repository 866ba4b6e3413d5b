"""Where each number of a pass lies in its buffer, so that one transfer brings them all."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Float
from torch import Tensor

from models.capture.records import WatchedParameter


@dataclass(frozen=True)
class Layout:
    """Columns of a (B, W) buffer: P activations, P gradients, I + I input blocks, O output blocks."""

    parameters: Sequence[WatchedParameter]
    in_starts: Sequence[int]
    out_starts: Sequence[int]

    @classmethod
    def of(cls, parameters: Sequence[WatchedParameter]) -> "Layout":
        """Blocks of all parameters one after the other."""
        return cls(
            parameters,
            [0, *accumulate(parameter.in_blocks for parameter in parameters)],
            [0, *accumulate(parameter.out_blocks for parameter in parameters)],
        )

    @property
    def widths(self) -> list[int]:
        """Of the five groups."""
        count, inputs, outputs = len(self.parameters), self.in_starts[-1], self.out_starts[-1]
        return [count, count, inputs, inputs, outputs]

    def empty(self, samples: int, device: torch.device) -> Float[Tensor, "B W"]:
        """A buffer in which nothing is measured yet: NaN."""
        return torch.full((samples, sum(self.widths)), torch.nan, dtype=torch.float32, device=device)

    def split(self, buffer_BW: Float[Tensor, "B W"]) -> tuple[Tensor, ...]:
        """Views: activation_BP, gradient_BP, in_activation_BI, in_gradient_BI, out_gradient_BO."""
        views: tuple[Tensor, ...] = buffer_BW.split(self.widths, dim=1)
        return views

    def write(
        self,
        buffer_BW: Float[Tensor, "B W"],
        index: int,
        *,
        activation: tuple[Tensor, Tensor | None] | None = None,
        gradient: tuple[Tensor, Tensor | None, Tensor] | None = None,
    ) -> None:
        """Put the sums of squares of parameter `index` in place.

        Args:
            buffer_BW: of one pass and device.
            index: of the parameter.
            activation: (B,) total and (B, its input blocks).
            gradient: (B,) total, (B, its input blocks), (B, its output blocks).
        """
        totals, gradients, in_activations, in_gradients, out_gradients = self.split(buffer_BW)
        inputs = slice(self.in_starts[index], self.in_starts[index + 1])
        if activation is not None:
            totals[:, index] = activation[0]
            if activation[1] is not None:
                in_activations[:, inputs] = activation[1]
        if gradient is not None:
            gradients[:, index] = gradient[0]
            if gradient[1] is not None:
                in_gradients[:, inputs] = gradient[1]
            out_gradients[:, self.out_starts[index] : self.out_starts[index + 1]] = gradient[2]
