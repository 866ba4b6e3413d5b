import pytest
import torch

from models.tiny_onn.modeling_tiny_onn import measure_imbalance

T, E, K = 12, 4, 2


def test_layers_of_a_pool_may_make_up_for_each_other():
    """All tokens choose experts 0 and 1 in one layer, and 2 and 3 in the other."""
    crowded_TE, chosen_TK = torch.tensor([9.0, 9.0, -9.0, -9.0]).expand(T, E), torch.tensor([0, 1]).expand(T, K)
    layers = [crowded_TE, crowded_TE.flip(1)], [chosen_TK, E - 1 - chosen_TK]
    assert float(measure_imbalance(*layers, pooled=True)) == pytest.approx(K)
    assert float(measure_imbalance(*layers, pooled=False)) == pytest.approx(E, rel=1e-3)
