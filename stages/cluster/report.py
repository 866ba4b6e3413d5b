"""The closing table."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from models.shape import Shape
from stages.cluster.config import NOTHING_RANKED, ClusterConfig, drops
from stages.cluster.evidence import CONTROL, LayerEvidence
from stages.cluster.layer import LayerPartition
from stages.cluster.objective import Objective, measure_objective
from stages.cluster.summary import Coactivation, measure_coactivation, share_of
from stages.contracts.job import Table


@dataclass(frozen=True)
class LayerFigures:
    """What the partition of one layer looks like."""

    coactivation: Coactivation
    objective: Objective | None  # None for methods that compare nothing
    always_on_share: float
    dropped: int
    dropped_share: float
    copies: int


def measure_layer(
    partition: LayerPartition, evidence: LayerEvidence, features_FC: Float[Tensor, "F C"] | None
) -> LayerFigures:
    """What the table says about one layer; `features_FC` are those that the method compared, if it did."""
    roles, statistics, layer = partition.roles, evidence.statistics, evidence.layer
    contribution_F, experts = evidence.contribution_F, len(partition.units_EN)
    objective = None
    if features_FC is not None and experts:
        compared_UC = features_FC[roles.routed_U]
        objective = measure_objective(compared_UC, partition.labels_U, experts, rng=evidence.draw(CONTROL))
    return LayerFigures(
        measure_coactivation(statistics.active_bits[layer], statistics.reservoir_tokens, partition.units_EN),
        objective,
        always_on_share=share_of(contribution_F, roles.always_on_S),
        dropped=len(roles.dropped_X),
        dropped_share=share_of(contribution_F, roles.dropped_X),
        copies=int(partition.units_EN.flatten().bincount(minlength=1).max()),
    )


COLUMNS = [
    "layer",
    "fire together within",
    "between experts",
    "ratio",
    "similarity",
    "by chance",
    "gap",
    "always-on share",
    "dropped units",
    "dropped share",
    "most copies",
]


def tabulate_layers(
    figures: Sequence[LayerFigures],
    cluster: ClusterConfig,
    description: str,
    pictures: Sequence[str],
    shapes: Sequence[Shape] = (),
) -> Table:
    """One row per layer, and how it was done; `shapes` are those of the layers of a pool."""
    rows = [
        [
            layer,
            _percent(figure.coactivation.within),
            _percent(figure.coactivation.between),
            "–" if figure.coactivation.ratio is None else f"{figure.coactivation.ratio:.2f}×",
            *_show_objective(figure.objective),
            f"{figure.always_on_share:.1%}",
            figure.dropped,
            f"{figure.dropped_share:.1%}",
            figure.copies,
        ]
        for layer, figure in enumerate(figures)
    ]
    notes = [
        description,
        "fire together: chance that two units are both active on a token; shares are of the layer's mean |h|·‖d‖",
    ]
    if any(figure.objective for figure in figures):
        notes.append(
            "similarity: mean cosine of a unit to its expert's mean, beside that of random experts; gap: what the best "
            "assignment to these means would add"
        )
    if shapes:
        notes.append(
            f"experts that the layers give to the pool, by {cluster.allocation}: "
            f"{', '.join(str(shape.experts) for shape in shapes)}"
        )
    if pictures:
        notes.append(f"maps: {', '.join(pictures)}")
    return Table("cluster", COLUMNS, rows, notes)


def describe(cluster: ClusterConfig, shape: Shape, width: int, score: str | None) -> str:
    """What grouped the neurons, and what chose those that are always on, dropped or dealt out, in a sentence.

    Args:
        cluster: how it was done.
        shape: of the carve.
        width: F.
        score: the score in words; None where it decided nothing.
    """
    how = f" on {' and '.join(cluster.views)}" if cluster.method == "balanced_kmeans" else ""
    said = [f"experts by {cluster.method}{how}"]
    ranking = "alignment" if cluster.aligns(shape, width) else score
    if shape.pooled:
        said += [f"neurons of the pool by {score}"]
        said += [f"always-on neurons by {ranking}"] if shape.always_on else []
    elif cluster.ranks(shape, width):
        roles = {
            "always-on": shape.always_on > 0,
            "dropped": drops(shape, width),
            "dealt-out": cluster.method == "rank",
        }
        said += [f"{' and '.join(role for role, taken in roles.items() if taken)} neurons by {ranking}"]
    else:
        said += [NOTHING_RANKED]
    return "; ".join(said)


def _show_objective(objective: Objective | None) -> list[str]:
    if objective is None:
        return ["–"] * 3
    return [f"{objective.similarity:.4f}", f"{objective.by_chance:.4f}", f"{objective.gap:.2%}"]


def _percent(chance: float | None) -> str:
    return "–" if chance is None else f"{chance:.3%}"
