"""What the units that stay on for every token are the highest of."""

from jaxtyping import Float
from torch import Tensor

from stages.cluster.evidence import LayerEvidence


def measure_by(name: str, evidence: LayerEvidence) -> Float[Tensor, "F"]:
    """The measure that `cluster.always_on_by` names, of one layer."""
    scores = evidence.scores
    measure_LF = {"contribution": scores.contribution, "frequency": scores.frequency, "score": scores.chosen}[name]
    return measure_LF[evidence.layer]
