"""What the units that stay on for every token are the highest of."""

from jaxtyping import Float
from torch import Tensor

from models.shape import Shape
from stages.calibration.elimination import rank_by_alignment
from stages.cluster.config import ClusterConfig
from stages.cluster.evidence import LayerEvidence


def rank_units(
    cluster: ClusterConfig, evidence: LayerEvidence, shape: Shape
) -> tuple[Float[Tensor, "F"], Float[Tensor, "F"]]:
    """What always-on units are the highest of, and what decides which of the others find a place in an expert.

    The units of a pool are those of the highest chosen score, whatever its layers' always-on units are chosen by.
    """
    chosen_F = evidence.scores.chosen[evidence.layer]
    if shape.pooled and not shape.always_on:
        return chosen_F, chosen_F
    measure_F = measure_by(cluster.always_on_by, evidence, shape, cluster.sample_tokens)
    return measure_F, measure_F if cluster.always_on_by == "alignment" and not shape.pooled else chosen_F


def measure_by(name: str, evidence: LayerEvidence, shape: Shape, tokens: int) -> Float[Tensor, "F"]:
    """The measure that `cluster.always_on_by` names, of one layer; `alignment` looks at so many calibration tokens."""
    if name == "alignment":
        activity = evidence.activity
        # Without always-on units only those that find no slot need be told from the rest.
        return rank_by_alignment(activity.ffn, [activity.sample(tokens)], shape.always_on or shape.experts * shape.n)
    scores = evidence.scores
    measure_LF = {"contribution": scores.contribution, "frequency": scores.frequency, "score": scores.chosen}[name]
    return measure_LF[evidence.layer]
