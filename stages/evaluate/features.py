"""A carved FFN that remembers what its columns multiply, for inputs that are asked for again and again."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from models.expert_loop import Block
from stages.calibration.carved_ffn import CarvedFFN

MOST_BYTES = 1 << 30  # of all that one layer remembers; the rest is computed again


@dataclass(frozen=True)
class RememberedFFN:
    """`features` by the identity of the inputs, which have to live as long; of others they are computed."""

    carved: CarvedFFN
    features: dict[int, Tensor]

    @classmethod
    def of(cls, carved: CarvedFFN) -> "RememberedFFN":
        """Nothing remembered yet."""
        return cls(carved, {})

    def remember(self, x_TD: Tensor, features_TF: Tensor) -> None:
        """Keep the features of these inputs where there is room."""
        if sum(kept.nbytes for kept in self.features.values()) + features_TF.nbytes <= MOST_BYTES:
            self.features[id(x_TD)] = features_TF

    @property
    def width(self) -> int:
        """F."""
        return self.carved.width

    def run(self, x_TD: Float[Tensor, "T D"]) -> tuple[list[Block], Float[Tensor, "T D"]]:
        """The features of all units, and the output."""
        features_TF = self._features(x_TD)
        everyone, units_F = (torch.arange(count, device=x_TD.device) for count in features_TF.shape)
        return [Block(everyone, units_F, features_TF)], features_TF @ self.carved.down_DF.T

    def __call__(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """The output."""
        return self._features(x_TD) @ self.carved.down_DF.T

    def _features(self, x_TD: Tensor) -> Float[Tensor, "T F"]:
        known_TF = self.features.get(id(x_TD))
        return self.carved.features(x_TD) if known_TF is None else known_TF

    def with_change(self, change_DF: Tensor) -> "RememberedFFN":
        """The same with other down columns."""
        return replace(self, carved=self.carved.with_change(change_DF))
