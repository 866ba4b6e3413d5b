"""What ranks the neurons: those that stay on for every token are the highest."""

import torch
from jaxtyping import Float
from torch import Tensor

from models.shape import Shape
from stages.calibration.elimination import rank_by_alignment
from stages.cluster.config import ClusterConfig
from stages.cluster.evidence import LayerEvidence


def rank_units(
    cluster: ClusterConfig, evidence: LayerEvidence, shape: Shape
) -> tuple[Float[Tensor, "F"], Float[Tensor, "F"]]:
    """What always-on neurons are the highest of, and what decides which of the others find a place in an expert.

    The same, but for a pool: its neurons are those of highest score, however its layers' always-on ones are chosen.
    """
    width = evidence.statistics.sum_abs.shape[1]
    if not cluster.ranks(shape, width) and not shape.pooled:
        flat_F = torch.zeros(width)
        return flat_F, flat_F
    measure_F = align(cluster, evidence, shape) if cluster.aligns(shape, width) else evidence.score_F
    return measure_F, evidence.score_F if shape.pooled else measure_F


def align(cluster: ClusterConfig, evidence: LayerEvidence, shape: Shape) -> Float[Tensor, "F"]:
    """The order in which the aligned output can do without neurons."""
    activity = evidence.activity
    # Without always-on neurons only those that find no slot need be told from the rest.
    keep = shape.always_on or shape.experts * shape.n
    return rank_by_alignment(activity.ffn, [activity.sample(cluster.sample_tokens)], keep)
