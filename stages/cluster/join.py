"""Several views of the same units as one."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize


def join_views(views: Sequence[Tensor]) -> Float[Tensor, "F C"]:
    """Put the rows of several views side by side so that each view tells units apart equally much.

    Every row becomes a direction, every view is divided by the root-mean-square distance of its directions from their
    mean: without that a view in which all units look much alike (non-negative features) would hardly count. The cosine
    of two joint rows is a mean of the views' cosines. A single view is returned as it is.

    Args:
        views: ``(F, C)`` fp32 each, C differs; a zero row is a unit without direction in that view.
    Returns:
        ``(F, ΣC)``; a view in which all units are the same is all zeros.
    """
    if len(views) == 1:
        return views[0]
    return torch.cat([_spread_to_one(normalize(view_FC.float(), dim=1)) for view_FC in views], dim=1)


def _spread_to_one(directions_FC: Float[Tensor, "F C"]) -> Float[Tensor, "F C"]:
    present_UC = directions_FC[directions_FC.any(dim=1)]
    spread = (present_UC - present_UC.mean(0)).square().sum(1).mean().sqrt()
    return directions_FC / spread if spread > 1e-6 else torch.zeros_like(directions_FC)
