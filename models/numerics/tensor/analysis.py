"""What a tensor would lose in low precision: value by value, and when it is added up.

found = analyze_tensor(gradient)
print(found.verdict("bfloat16"), *found.advice)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from models.errors import ConfigError
from models.numerics.diff.verdict import Verdict
from models.numerics.formats import FORMATS, NumberFormat, find_format
from models.numerics.ranges import AxisRange, axis_ranges
from models.numerics.tensor.reduction import ReductionLoss, measure_reductions
from models.numerics.tensor.rounding import FormatLoss, measure_loss

FIRST_OCTAVE, _LAST_OCTAVE = -150, 129  # of the histogram; what lies outside stands in the first or last one


@dataclass(frozen=True)
class TensorAnalysis:
    """Everything about one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nonfinite: int  # values that are left out of everything else
    zeros: int
    losses: Sequence[FormatLoss]
    reductions: Sequence[ReductionLoss]
    ranges: Sequence[AxisRange]
    octaves: Sequence[int]  # values of size 2^k to 2^(k+1), from k = -150
    notes: Sequence[str] = field(default=())

    def verdict(self, name: str) -> Verdict:
        """In this format."""
        return next(loss.verdict for loss in self.losses if loss.format == name)

    @property
    def advice(self) -> list[str]:
        """What to compute otherwise, and why."""
        sums = [loss.advice for loss in self.reductions if loss.advice]
        return sums + [_swallowed(axis, loss) for loss in self.losses for axis in self.ranges if _swallows(axis, loss)]


def _swallows(axis: AxisRange, loss: FormatLoss) -> bool:
    return axis.ratio > 2 / FORMATS[loss.format].epsilon


def _swallowed(axis: AxisRange, loss: FormatLoss) -> str:
    return (
        f"dim {axis.axis} holds up to {axis.largest:.3g} at {axis.largest_at} and {axis.smallest:.3g} at "
        f"{axis.smallest_at}: added up in {loss.format}, the large ones swallow the small ones; scale them apart or "
        "add in fp32"
    )


@torch.no_grad()
def analyze_tensor(
    tensor: Shaped[Tensor, "..."],
    formats: Sequence[str | torch.dtype] = tuple(FORMATS),
    *,
    name: str = "tensor",
) -> TensorAnalysis:
    """Look at a tensor through number formats.

    Args:
        tensor: of floating-point or complex numbers; the latter as pairs along one more axis.
        formats: bfloat16, float16, float8_e4m3fn, float8_e5m2, the last two where torch has them.
        name: what it is called in reports.
    Raises:
        ConfigError: a tensor of integers, or an unknown format.
    """
    targets = [find_format(one, "formats") for one in formats]
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise ConfigError(
            f"{name} holds {str(tensor.dtype).removeprefix('torch.')}, which no floating-point format rounds in use",
            where=f"tensor of shape {tuple(tensor.shape)}",
            do="give a floating-point tensor, or tensor.float()",
        )
    values, notes = _prepare(tensor)
    finite = values.isfinite()
    clean = torch.where(finite, values, 0)
    nonfinite = values.numel() - int(finite.sum())
    notes += [f"{nonfinite:,} of {values.numel():,} values are not finite and left out"] * (nonfinite > 0)
    notes += ["the tensor is empty"] * (not values.numel())
    return TensorAnalysis(
        name,
        tuple(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        nonfinite,
        int((values == 0).sum()),
        [measure_loss(clean.flatten(), target) for target in targets],
        [loss for target in targets for loss in _reductions(clean, target)],
        axis_ranges(clean),
        _octaves(clean),
        notes,
    )


def _prepare(tensor: Shaped[Tensor, "..."]) -> tuple[Float[Tensor, "..."], list[str]]:
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()), ["complex: the last dim holds real and imaginary parts"]
    return (tensor if tensor.dtype == torch.float64 else tensor.float()), []


def _reductions(clean: Float[Tensor, "..."], target: NumberFormat) -> list[ReductionLoss]:
    return measure_reductions(clean, target) if clean.numel() else []


def _octaves(clean: Float[Tensor, "..."]) -> list[int]:
    exponents = torch.frexp(clean[clean != 0]).exponent.long() - 1
    places = exponents.clamp(FIRST_OCTAVE, _LAST_OCTAVE) - FIRST_OCTAVE
    counts: list[int] = torch.bincount(places, minlength=_LAST_OCTAVE - FIRST_OCTAVE + 1).tolist()
    return counts
