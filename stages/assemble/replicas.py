"""Units that stand in more than one expert."""

from dataclasses import replace

from jaxtyping import Int
from torch import Tensor

from models.experts import LayerExperts


def divide_by_multiplicity(
    experts: LayerExperts, units_EN: Int[Tensor, "E N"], multiplicity_F: Int[Tensor, "F"]
) -> LayerExperts:
    """Share a unit's down column among its copies, so that all experts together give the dense FFN.

    With fewer experts on than there are, copies of a unit are rarely active together and the slices stay as they are.
    """
    copies_EN = multiplicity_F[units_EN.long()].to(experts.down_EDN.device)
    return replace(experts, down_EDN=(experts.down_EDN.float() / copies_EN[:, None]).to(experts.down_EDN.dtype))
