"""Small values that a sum in low precision no longer sees, beside far larger ones.

The error of such a sum is small beside the sum; only taking the small values away shows that they had no part in it.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from instruments.precision.calls import Arguments, find_tensors, map_tensors
from instruments.precision.formats import AxisRange, NumberFormat, axis_ranges

_Run = Callable[[Arguments], Mapping[str, Tensor]]
_NONE = torch.empty(0, dtype=torch.float64)
# FP32 itself must see them: their part is above so many units in its last place.
_SEEN = 4 * torch.finfo(torch.float32).eps


def sums_up(module: nn.Module, arguments: Arguments, output: Any) -> bool:  # noqa: ANN401 - whatever it returns
    """Whether it gives fewer axes than it gets, and has no weights that could be large where values are small."""
    given = [tensor.ndim for tensor in find_tensors(arguments).values() if tensor.is_floating_point()]
    made = [tensor.ndim for tensor in find_tensors(output).values() if tensor.is_floating_point()]
    return bool(given and made) and max(made) < max(given) and next(module.parameters(), None) is None


def find_swamping(arguments: Arguments, low: NumberFormat, exact: _Run, rounded: _Run) -> str:
    """In words, which slices of the inputs have no part in the low-precision output that they have in FP32.

    Args:
        arguments: of the module.
        low: slices below half of its unit in the last place of the largest slice are suspected.
        exact: the module in FP32; its outputs by path.
        rounded: the module in low precision.
    """
    for axis in _suspects(arguments, low):
        without = map_tensors(partial(_drop_small, axis=axis, low=low), arguments)
        whole, rest = _flat(exact(arguments)), _flat(exact(without))
        low_whole, low_rest = _flat(rounded(arguments)), _flat(rounded(without))
        if not whole.shape == rest.shape == low_whole.shape == low_rest.shape:
            continue
        part = whole - rest
        seen = float(part.norm()) > _SEEN * float(whole.norm())
        if seen and float((low_whole - low_rest - part).norm()) > 0.5 * float(part.norm()):
            return (
                f"dim {axis.axis} of its input holds {axis.largest:.3g} at {axis.largest_at} and no more than "
                f"{axis.smallest:.3g} at {axis.smallest_at}: in {low.name} the sum no longer sees the small ones"
            )
    return ""


def _flat(outputs: Mapping[str, Tensor]) -> Tensor:
    return torch.cat(
        [tensor.double().flatten() for tensor in outputs.values() if tensor.is_floating_point()] or [_NONE]
    )


def _suspects(arguments: Arguments, low: NumberFormat) -> list[AxisRange]:
    inputs = [tensor for tensor in find_tensors(arguments).values() if tensor.is_floating_point()]
    return [axis for tensor in inputs for axis in axis_ranges(tensor) if axis.ratio > 2 / low.epsilon]


def _drop_small(tensor: Tensor, axis: AxisRange, low: NumberFormat) -> Tensor:
    """Zeros for the slices whose values are below half a unit in the last place of the largest."""
    if not tensor.is_floating_point() or tensor.ndim < -axis.axis or tensor.shape[axis.axis] != axis.size:
        return tensor
    others = [other for other in range(tensor.ndim) if other != axis.axis % tensor.ndim]
    sizes = tensor.abs().amax(others, keepdim=True) if others else tensor.abs()
    return torch.where(sizes < axis.largest * low.epsilon / 2, torch.zeros_like(tensor), tensor)
