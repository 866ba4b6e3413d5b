"""What every expert gives for every token, as far as the choice between them depends on it."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from models.expert_loop import ExpertLoop
from stages.routing.objectives import OutputError

NUMBERS = 2**26  # of expert outputs in memory at a time: 256 MiB


def output_error(loop: ExpertLoop, x_TD: Float[Tensor, "T D"], target_TD: Float[Tensor, "T D"]) -> OutputError:
    """The objective of choosing experts on these tokens, so that the layer's output meets the target."""
    wanted_TD = target_TD - loop.always_on_output(x_TD)
    chunk = max(1, NUMBERS // (len(loop.units_EN) * x_TD.shape[1]))
    gains, overlaps = [], []
    for x_tD, wanted_tD in zip(torch.split(x_TD, chunk), torch.split(wanted_TD, chunk), strict=True):
        output_tED = loop.expert_outputs(x_tD)
        gains.append((output_tED @ wanted_tD[:, :, None])[:, :, 0])
        overlaps.append(output_tED @ output_tED.mT)
    return OutputError(torch.cat(gains), torch.cat(overlaps), wanted_TD.square().sum(1))


def error_drops(loop: ExpertLoop, x_TD: Float[Tensor, "T D"], target_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T E"]:
    """By how much each expert alone lowers the token's squared output error: (2·r·y_e − ‖y_e‖²) / ‖r‖².

    r is what the always-on units leave to be given. 1 for an expert that gives all of it, 0 for one that gives nothing;
    one that more than doubles the error is as bad as any that does, −1, so that a few loud outputs do not decide a fit.
    """
    wanted_TD = target_TD - loop.always_on_output(x_TD)
    chunk = max(1, NUMBERS // (len(loop.units_EN) * x_TD.shape[1]))
    drops = []
    for x_tD, wanted_tD in zip(torch.split(x_TD, chunk), torch.split(wanted_TD, chunk), strict=True):
        output_tED = loop.expert_outputs(x_tD)
        gains_tE = (output_tED @ wanted_tD[:, :, None])[:, :, 0]
        drops.append(2 * gains_tE - output_tED.square().sum(2))
    scale_T1 = wanted_TD.square().sum(1, keepdim=True).clamp_min(1e-30)
    return (torch.cat(drops) / scale_T1).clamp_min(-1)


def output_norms(loop: ExpertLoop, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T E"]:
    """‖y_e‖ of every expert for every token."""
    chunk = max(1, NUMBERS // (len(loop.units_EN) * x_TD.shape[1]))
    return torch.cat([loop.expert_outputs(x_tD).norm(dim=2) for x_tD in torch.split(x_TD, chunk)])


def join(parts: Sequence[OutputError]) -> OutputError:
    """The objective on the tokens of all parts."""
    return OutputError(
        torch.cat([part.gains_TE for part in parts]),
        torch.cat([part.overlaps_TEE for part in parts]),
        torch.cat([part.wanted_T for part in parts]),
    )
