"""What the units that stay on for every token are the highest of."""

from jaxtyping import Float
from torch import Tensor

from models.shape import Shape
from stages.calibration.elimination import rank_by_alignment
from stages.cluster.evidence import LayerEvidence


def measure_by(name: str, evidence: LayerEvidence, shape: Shape, tokens: int) -> Float[Tensor, "F"]:
    """The measure that `cluster.always_on_by` names, of one layer; `alignment` looks at so many calibration tokens."""
    if name == "alignment":
        activity = evidence.activity
        # Without always-on units only those that find no slot need be told from the rest.
        return rank_by_alignment(activity.ffn, [activity.sample(tokens)], shape.always_on or shape.experts * shape.n)
    scores = evidence.scores
    measure_LF = {"contribution": scores.contribution, "frequency": scores.frequency, "score": scores.chosen}[name]
    return measure_LF[evidence.layer]
