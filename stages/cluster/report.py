"""The table of the stage: the roles of each layer's neurons."""

from collections.abc import Sequence

from jaxtyping import Float, Int
from torch import Tensor

from models.config import MoEShape
from stages.artifacts.job import Table
from stages.cluster.config import NOTHING_RANKED, ClusterConfig, drops
from stages.cluster.layer import LayerEvidence, LayerPartition


def share_of(contribution_F: Float[Tensor, "F"], neurons: Int[Tensor, "U"]) -> float:
    """These neurons' share of the layer's contribution; 0 if the layer contributes nothing."""
    total = float(contribution_F.sum())
    return float(contribution_F[neurons].sum()) / total if total else 0.0


def measure_layer(partition: LayerPartition, evidence: LayerEvidence) -> list[object]:
    """The layer's row of the table."""
    return [
        evidence.layer,
        f"{share_of(evidence.contribution_F, partition.always_on_S):.1%}",
        len(partition.dropped_X),
        f"{share_of(evidence.contribution_F, partition.dropped_X):.1%}",
        int(partition.neurons_EN.flatten().bincount(minlength=1).max()),
    ]


COLUMNS = ("layer", "always-on share", "dropped neurons", "dropped share", "most copies")


def tabulate_layers(
    rows: Sequence[list[object]], description: str, pictures: Sequence[str], shapes: Sequence[MoEShape] = ()
) -> Table:
    """The rows of the carved layers, and notes on the method; `shapes` are the layers' shapes in a pool."""
    notes = [description, "shares are of the layer's mean |h|·‖d‖"]
    if shapes:
        given = ", ".join(str(shape.experts) for shape in shapes)
        notes.append(f"experts that the layers give to the pool, by score: {given}")
    if pictures:
        notes.append(f"maps: {', '.join(pictures)}")
    return Table("cluster", COLUMNS, rows, notes)


def describe(cluster: ClusterConfig, shape: MoEShape, width: int, score: str | None) -> str:
    """One sentence on the method, and which neurons the score chose.

    `score` describes the score; None if it had no effect.
    """
    chosen = {
        "always-on": shape.always_on > 0,
        "dropped": drops(shape, width) and not shape.pooled,
        "dealt-out": cluster.method == "rank" and not shape.pooled,
        "pooled": shape.pooled,
    }
    roles = " and ".join(role for role, taken in chosen.items() if taken)
    said = f"{roles} neurons by {score}" if score else NOTHING_RANKED
    return f"experts by {cluster.method}; {said}"
