"""Which text domains a unit is important to."""

import torch
from jaxtyping import Float
from torch import Tensor


def profile_features(taylor_GF: Float[Tensor, "G F"]) -> Float[Tensor, "F G"]:
    """Roots of the shares of a unit's Taylor score that fall to each domain, all domains being equally loud.

    The rows have unit length and the cosine of two rows is the Bhattacharyya coefficient of the two profiles.

    Args:
        taylor_GF: mean |h·∂loss/∂h| of every domain, >= 0.
    Returns:
        ``(F, G)`` fp32; the zero row for a unit of no importance.
    """
    loudness_G1 = taylor_GF.double().sum(1, keepdim=True)
    even_GF = taylor_GF.double() / loudness_G1.clamp_min(torch.finfo(torch.float64).tiny)
    shares_GF = even_GF / even_GF.sum(0).clamp_min(torch.finfo(torch.float64).tiny)
    return shares_GF.sqrt().T.float()
