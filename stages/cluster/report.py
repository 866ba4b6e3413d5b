"""The closing table."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from stages.cluster.config import ClusterConfig
from stages.cluster.layer import LayerPartition
from stages.cluster.summary import Coactivation, measure_coactivation, share_of
from stages.contracts.job import Table
from stages.contracts.statistics import UnitStatistics


@dataclass(frozen=True)
class LayerFigures:
    """What the partition of one layer looks like."""

    coactivation: Coactivation
    always_on_share: float
    dropped: int
    dropped_share: float
    copies: int


def measure_layer(
    partition: LayerPartition, statistics: UnitStatistics, contribution_F: Float[Tensor, "F"], layer: int
) -> LayerFigures:
    """What the table says about one layer."""
    roles = partition.roles
    return LayerFigures(
        measure_coactivation(statistics.active_bits[layer], statistics.reservoir_tokens, partition.units_EN),
        always_on_share=share_of(contribution_F, roles.always_on_S),
        dropped=len(roles.dropped_X),
        dropped_share=share_of(contribution_F, roles.dropped_X),
        copies=int(partition.units_EN.flatten().bincount().max()),
    )


COLUMNS = [
    "layer",
    "fire together within",
    "between experts",
    "ratio",
    "always-on share",
    "dropped units",
    "dropped share",
    "most copies",
]


def tabulate_layers(
    figures: Sequence[LayerFigures], cluster: ClusterConfig, score: str, pictures: Sequence[str]
) -> Table:
    """One row per layer, and how it was done."""
    rows = [
        [
            layer,
            _percent(figure.coactivation.within),
            _percent(figure.coactivation.between),
            "–" if figure.coactivation.ratio is None else f"{figure.coactivation.ratio:.2f}×",
            f"{figure.always_on_share:.1%}",
            figure.dropped,
            f"{figure.dropped_share:.1%}",
            figure.copies,
        ]
        for layer, figure in enumerate(figures)
    ]
    notes = [
        describe(cluster, score),
        "fire together: chance that two units are both active on a token; shares are of the layer's mean |h|·‖d‖",
    ]
    if pictures:
        notes.append(f"maps: {', '.join(pictures)}")
    return Table("cluster", COLUMNS, rows, notes)


def describe(cluster: ClusterConfig, score: str) -> str:
    """How the units were grouped, in a sentence."""
    how = f" on {' and '.join(cluster.views)}" if cluster.method == "balanced_kmeans" else ""
    return f"experts by {cluster.method}{how}; always-on units by {cluster.always_on_by}; units ranked by {score}"


def _percent(chance: float | None) -> str:
    return "–" if chance is None else f"{chance:.3%}"
