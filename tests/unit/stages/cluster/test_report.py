import pytest

from models.config import MoEShape
from stages.cluster.config import ClusterConfig
from stages.cluster.report import COLUMNS, Coactivation, LayerFigures, describe, tabulate_layers


def test_the_table_reads_well():
    figures = [
        LayerFigures(
            Coactivation(0.0172, 0.0086),
            always_on_share=0.379,
            dropped=128,
            dropped_share=0.019,
            copies=1,
        ),
        LayerFigures(Coactivation(0.01, None), always_on_share=0.0, dropped=0, dropped_share=0.0, copies=25),
    ]
    table = tabulate_layers(dict(enumerate(figures)), "experts by some method", ["neuron_map_layer_000.png"])
    assert table.title == "cluster"
    assert table.columns == COLUMNS
    assert table.rows == [
        [0, "1.720%", "0.860%", "2.00×", "37.9%", 128, "1.9%", 1],
        [1, "1.000%", "–", "–", "0.0%", 0, "0.0%", 25],
    ]
    assert table.notes == [
        "experts by some method",
        "fire together: chance that two neurons are both active on a token; shares are of the layer's mean |h|·‖d‖",
        "maps: neuron_map_layer_000.png",
    ]


SCORE, ALIGNMENT = {"always_on_by": "score"}, {"always_on_by": "alignment"}


@pytest.mark.parametrize(
    ("settings", "shape", "said"),
    [
        (SCORE, MoEShape(4, 6, 2, 8), "experts by router_aware; always-on neurons by s_p"),
        (SCORE, MoEShape(4, 5, 2, 8), "experts by router_aware; always-on and dropped neurons by s_p"),
        (SCORE, MoEShape(4, 6, 2, 0), "experts by router_aware; dropped neurons by s_p"),
        (SCORE, MoEShape(4, 8, 2, 0), "experts by router_aware; no neuron is always on or dropped"),
        (SCORE, MoEShape(5, 8, 2, 0), "experts by router_aware; no neuron is always on or dropped"),
        (ALIGNMENT, MoEShape(4, 6, 2, 8), "experts by router_aware; always-on neurons by alignment"),
        (ALIGNMENT, MoEShape(4, 8, 2, 0), "experts by router_aware; no neuron is always on or dropped"),
        (SCORE | {"method": "rank"}, MoEShape(4, 8, 2, 0), "experts by rank; dealt-out neurons by s_p"),
        (
            ALIGNMENT | {"method": "rank"},
            MoEShape(4, 6, 2, 8),
            "experts by rank; always-on and dealt-out neurons by alignment",
        ),
        ({"method": "random"}, MoEShape(4, 8, 2, 0), "experts by random; no neuron is always on or dropped"),
        (
            {"method": "balanced_kmeans", "features": "gate_rows"},
            MoEShape(4, 6, 2, 8),
            "experts by balanced_kmeans on gate_rows; always-on neurons by s_p",
        ),
        (SCORE, MoEShape(4, 6, 2, 0, "global_pool"), "experts by router_aware; neurons of the pool by s_p"),
        (
            ALIGNMENT,
            MoEShape(4, 6, 2, 8, "global_pool"),
            "experts by router_aware; neurons of the pool by s_p; always-on neurons by alignment",
        ),
    ],
)
def test_nothing_is_said_to_decide_that_did_not(settings, shape, said):
    cluster = ClusterConfig(**settings)
    score = "s_p" if cluster.reads_score(shape, 32) else None
    assert describe(cluster, shape, 32, score) == said
