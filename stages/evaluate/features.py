"""What is computed once for inputs that are asked for again and again."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from models.expert_loop import Block
from stages.calibration.carved_ffn import CarvedFFN

MOST_BYTES = 1 << 30  # that one memo keeps; the rest is computed again


class Memo:
    """A function of a tensor whose values are kept by the identity of the tensor, which has to live as long."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        """Nothing is kept yet."""
        self._compute = compute
        self._kept: dict[int, Tensor] = {}
        self._bytes = 0

    def __call__(self, x_TD: Tensor) -> Tensor:
        """The value, kept where there is room."""
        if (known := self._kept.get(id(x_TD))) is not None:
            return known
        value = self._compute(x_TD)
        self.keep(x_TD, value)
        return value

    def keep(self, x_TD: Tensor, value: Tensor) -> None:
        """A value that was computed elsewhere, kept where there is room."""
        if self._bytes + value.nbytes <= MOST_BYTES:
            self._kept[id(x_TD)] = value
            self._bytes += value.nbytes

    def forget(self, x_TD: Tensor) -> None:
        """Make room, where this one's value is kept."""
        value = self._kept.pop(id(x_TD), None)
        self._bytes -= 0 if value is None else value.nbytes


@dataclass(frozen=True)
class RememberedFFN:
    """A carved FFN that remembers what its columns multiply."""

    carved: CarvedFFN
    features: Memo

    @classmethod
    def of(cls, carved: CarvedFFN) -> "RememberedFFN":
        """Nothing remembered yet."""
        return cls(carved, Memo(carved.features))

    @property
    def width(self) -> int:
        """F."""
        return self.carved.width

    def run(self, x_TD: Float[Tensor, "T D"]) -> tuple[list[Block], Float[Tensor, "T D"]]:
        """The features of all units, and the output."""
        features_TF = self.features(x_TD)
        everyone, units_F = (torch.arange(count, device=x_TD.device) for count in features_TF.shape)
        return [Block(everyone, units_F, features_TF)], features_TF @ self.carved.down_DF.T

    def __call__(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """The output."""
        return self.features(x_TD) @ self.carved.down_DF.T

    def with_change(self, change_DF: Tensor) -> "RememberedFFN":
        """The same with other down columns, which no feature depends on."""
        return replace(self, carved=self.carved.with_change(change_DF))
