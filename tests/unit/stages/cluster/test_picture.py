import pytest

from instruments.errors import ConfigError
from stages.cluster.config import ClusterConfig
from stages.cluster.picture import layers_to_draw


@pytest.mark.parametrize(
    ("wanted", "layers", "drawn"),
    [([], 9, [0, 4, 8]), ([], 2, [0, 1]), ([], 1, [0]), ([-1, 3, 3], 9, [3, 8]), ([-9, 8], 9, [0, 8])],
)
def test_layers_count_from_either_end(wanted, layers, drawn):
    assert layers_to_draw(ClusterConfig(map_layers=wanted), layers) == drawn


@pytest.mark.parametrize(("wanted", "drawn"), [([], [1, 5, 7]), ([0, -2, 8], [7])])
def test_layers_that_stay_dense_are_not_drawn(wanted, drawn):
    assert layers_to_draw(ClusterConfig(map_layers=wanted), 9, (0, 4, 8)) == drawn


def test_no_map_no_layers():
    assert layers_to_draw(ClusterConfig(map="none", map_layers=[77]), 4) == []


def test_layers_that_do_not_exist_are_all_named():
    with pytest.raises(ConfigError) as error:
        layers_to_draw(ClusterConfig(map_layers=[4, 1, -5]), 4)
    assert str(error.value) == (
        "no layer 4, -5: the model has 4\n"
        "  where: setting cluster.map_layers\n"
        "  do:    cluster.map_layers=[] for the first, the middle and the last"
    )
