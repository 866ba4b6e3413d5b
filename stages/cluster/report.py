"""The table of the stage: how well each layer's neurons are grouped."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from models.config import MoEShape
from models.routing import membership
from stages.artifacts.job import Table
from stages.artifacts.rendering import show
from stages.cluster.config import NOTHING_RANKED, ClusterConfig, drops
from stages.cluster.layer import LayerEvidence, LayerPartition
from stages.cluster.methods import unpack_bits


def measure_coactivation(
    active_bits_Fr: UInt8[Tensor, "F r"], tokens: int, neurons_EN: Int[Tensor, "E N"]
) -> tuple[float | None, float | None]:
    """Probability that two neurons of one expert both fire on a token, and that of two neurons of different experts.

    Computed from the number of firing neurons per token and expert, not pair by pair. Copies of one neuron are no pair;
    without a pair, the probability is None.
    `active_bits_Fr` is ``(F, ceil(R/8))``, packed bits of R = `tokens`.
    """
    experts, size = neurons_EN.shape
    member_EF = membership(neurons_EN.to(active_bits_Fr.device), len(active_bits_Fr))
    copies_F = member_EF.sum(0).long()
    bits_FR, twice_F = unpack_bits(active_bits_Fr, tokens), copies_F * (copies_F - 1)
    firing_RE = (bits_FR.T @ member_EF.T).long()
    counts = [firing_RE.sum(), firing_RE.square().sum(), firing_RE.sum(1).square().sum()]
    counts += [(bits_FR.sum(1).long() * twice_F).sum(), twice_F.sum()]
    firing, squares, all_squares, same_neuron, same_pairs = torch.stack(counts).tolist()
    within, between = squares - firing, all_squares - squares - same_neuron
    pairs_within = experts * size * (size - 1)
    pairs_between = (experts * size) ** 2 - experts * size**2 - same_pairs
    return _mean(within, pairs_within * tokens), _mean(between, pairs_between * tokens)


def share_of(contribution_F: Float[Tensor, "F"], neurons: Int[Tensor, "U"]) -> float:
    """These neurons' share of the layer's contribution; 0 if the layer contributes nothing."""
    total = float(contribution_F.sum())
    return float(contribution_F[neurons].sum()) / total if total else 0.0


def _mean(total: int, count: int) -> float | None:
    return total / count if count else None


def measure_layer(partition: LayerPartition, evidence: LayerEvidence) -> list[object]:
    """The layer's row of the table; the ratio is about 1 for a random partition."""
    statistics, layer, contribution_F = evidence.statistics, evidence.layer, evidence.contribution_F
    within, between = measure_coactivation(evidence.active_bits_Fr, statistics.reservoir_tokens, partition.neurons_EN)
    return [
        layer,
        show(within, ".3%"),
        show(between, ".3%"),
        f"{within / between:.2f}×" if within is not None and between else "–",
        f"{share_of(contribution_F, partition.always_on_S):.1%}",
        len(partition.dropped_X),
        f"{share_of(contribution_F, partition.dropped_X):.1%}",
        int(partition.neurons_EN.flatten().bincount(minlength=1).max()),
    ]


COLUMNS = (
    "layer", "fire together within", "between experts", "ratio", "always-on share", "dropped neurons", "dropped share",
    "most copies",
)  # fmt: skip


def tabulate_layers(
    rows: Sequence[list[object]], description: str, pictures: Sequence[str], shapes: Sequence[MoEShape] = ()
) -> Table:
    """The rows of the carved layers, and notes on the method; `shapes` are the layers' shapes in a pool."""
    notes = [
        description,
        "fire together: chance that two neurons are both active on a token; shares are of the layer's mean |h|·‖d‖",
    ]
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
