from stages.cluster.config import ClusterConfig
from stages.cluster.objective import Objective
from stages.cluster.report import COLUMNS, LayerFigures, tabulate_layers
from stages.cluster.summary import Coactivation


def test_the_table_reads_well():
    figures = [
        LayerFigures(
            Coactivation(0.0172, 0.0086),
            Objective(0.61234, 0.2, 0.00012),
            always_on_share=0.379,
            dropped=128,
            dropped_share=0.019,
            copies=1,
        ),
        LayerFigures(Coactivation(0.01, None), None, always_on_share=0.0, dropped=0, dropped_share=0.0, copies=25),
    ]
    table = tabulate_layers(
        figures, ClusterConfig(method="balanced_kmeans", always_on_by="contribution"), "s_p", ["unit_map_layer_000.png"]
    )
    assert table.title == "cluster"
    assert table.columns == COLUMNS
    assert table.rows == [
        [0, "1.720%", "0.860%", "2.00×", "0.6123", "0.2000", "0.01%", "37.9%", 128, "1.9%", 1],
        [1, "1.000%", "–", "–", "–", "–", "–", "0.0%", 0, "0.0%", 25],
    ]
    assert table.notes == [
        "experts by balanced_kmeans on coactivation; always-on units by contribution; units ranked by s_p",
        "fire together: chance that two units are both active on a token; shares are of the layer's mean |h|·‖d‖",
        "similarity: mean cosine of a unit to its expert's mean, beside that of random experts; gap: what the best "
        "assignment to these means would add",
        "maps: unit_map_layer_000.png",
    ]


def test_only_the_method_that_compares_features_names_them():
    notes = tabulate_layers([], ClusterConfig(method="rank", always_on_by="frequency"), "taylor", []).notes
    assert notes[0] == "experts by rank; always-on units by frequency; units ranked by taylor"
    assert len(notes) == 2
