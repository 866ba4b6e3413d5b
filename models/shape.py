"""The shape of a carve."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """E experts of N neurons, K of them active per token, beside S always-on neurons, per layer."""

    experts: int
    n: int
    top_k: int
    always_on: int

    @property
    def active_width(self) -> int:
        """Neurons a token passes through: S + K·N."""
        return self.always_on + self.top_k * self.n
