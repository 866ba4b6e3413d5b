"""The number formats of low precision: what they reach, and where they round."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from models.errors import ConfigError


@dataclass(frozen=True)
class NumberFormat:
    """A binary floating-point format of torch."""

    name: str
    dtype: torch.dtype

    @property
    def largest(self) -> float:
        """The largest finite value."""
        return torch.finfo(self.dtype).max

    @property
    def epsilon(self) -> float:
        """From 1 to the next value: one unit in the last place of 1."""
        return torch.finfo(self.dtype).eps

    @property
    def smallest_normal(self) -> float:
        """Below it values lose digits (underflow) ..."""
        return torch.finfo(self.dtype).smallest_normal

    @property
    def smallest(self) -> float:
        """... down to this one; below half of it they become 0 (flush to zero)."""
        return self.smallest_normal * self.epsilon

    def ulp(self, values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """One unit in the last place of each value; of what the format cannot reach, as if it went on."""
        exponent = torch.frexp(values.abs().clamp_min(self.smallest_normal)).exponent - 1
        return torch.ldexp(torch.full_like(values, self.epsilon), exponent)

    def rounded(self, values: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
        """Each value as the format holds it, in the number format it came in."""
        return values.to(self.dtype).to(values.dtype)


# fp8 where torch has it.
FORMATS = {
    name: NumberFormat(name, getattr(torch, name))
    for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
    if hasattr(torch, name)
}


def find_format(name: str | torch.dtype, setting: str = "precision") -> NumberFormat:
    """The format of that name, as in "bfloat16" or torch.bfloat16. Raises ConfigError: there is none."""
    name = str(name).removeprefix("torch.")
    if name not in FORMATS:
        raise ConfigError(
            f"{setting}={name} is no low-precision format of this torch",
            where=f"argument {setting}",
            do=f"{setting}= one of {', '.join(FORMATS)}",
        )
    return FORMATS[name]


def decibels(relative: float) -> float:
    """−20·log10 of a relative error."""
    return math.inf if not relative else -20 * math.log10(relative)
