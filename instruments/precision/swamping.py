"""Sums in which large values make small ones disappear."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from instruments.precision.calls import Arguments, dtype_name, find_tensors, map_tensors
from instruments.precision.comparison import AxisRange, axis_ranges, sizes_along

_Run = Callable[[Arguments], Mapping[str, Tensor]]
# Least share of the small slices in the FP32 output: below it FP32 loses them as well.
_SEEN = 4 * torch.finfo(torch.float32).eps


def sums_up(module: nn.Module, arguments: Arguments, output: Any) -> bool:  # noqa: ANN401 - any output of a module
    """Whether the output has fewer axes than the input; no module with weights, as these could offset small values."""
    given = [tensor.ndim for tensor in find_tensors(arguments).values() if tensor.is_floating_point()]
    made = [tensor.ndim for tensor in find_tensors(output).values() if tensor.is_floating_point()]
    return bool(given and made) and max(made) < max(given) and next(module.parameters(), None) is None


def find_swamping(arguments: Arguments, low: torch.dtype, exact: _Run, rounded: _Run) -> str:
    """Describe the input slices that change the FP32 output and are lost in the low-precision output; "" if none.

    Candidates are slices below half a unit in the last place of the largest one. `exact` runs the module in FP32,
    `rounded` in low precision.
    """
    inputs = [tensor for tensor in find_tensors(arguments).values() if tensor.is_floating_point()]
    ranges = [axis for tensor in inputs for axis in axis_ranges(tensor)]
    for axis in [axis for axis in ranges if axis.ratio > 2 / torch.finfo(low).eps]:
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
                f"{axis.smallest:.3g} at {axis.smallest_at}: in {dtype_name(low)} the sum no longer sees the small ones"
            )
    return ""


def _flat(outputs: Mapping[str, Tensor]) -> Tensor:
    parts = [tensor.double().flatten() for tensor in outputs.values() if tensor.is_floating_point()]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)


def _drop_small(tensor: Tensor, axis: AxisRange, low: torch.dtype) -> Tensor:
    """Set slices to zero whose values are below half a unit in the last place of the largest."""
    if not tensor.is_floating_point() or tensor.ndim < -axis.axis or tensor.shape[axis.axis] != axis.size:
        return tensor
    sizes = sizes_along(tensor, axis.axis, keepdim=True)
    return torch.where(sizes < axis.largest * torch.finfo(low).eps / 2, torch.zeros_like(tensor), tensor)
