import pytest
import torch

from models.tiny_onn.modeling_tiny_onn import measure_imbalance

T, E, K, L = 12, 4, 2, 3


def even():
    """Every expert is chosen equally often."""
    chosen_TK = (torch.arange(T)[:, None] + torch.tensor([0, 1])) % E
    return torch.zeros(T, E).scatter(1, chosen_TK, 3.0), chosen_TK


def crowded():
    """All tokens choose experts 0 and 1."""
    return torch.tensor([9.0, 9.0, -9.0, -9.0]).expand(T, E), torch.tensor([0, 1]).expand(T, K)


def measure(layers, **options):
    logits, chosen = zip(*layers, strict=True)
    return float(measure_imbalance(list(logits), list(chosen), **{"pooled": False} | options))


@pytest.mark.parametrize("pooled", [False, True])
def test_even_load_gives_k_and_crowding_gives_e(pooled):
    assert measure([even()] * L, pooled=pooled) == pytest.approx(K)
    assert measure([crowded()] * L, pooled=pooled) == pytest.approx(E, rel=1e-3)


def test_layers_of_a_pool_may_make_up_for_each_other():
    logits, chosen = crowded()
    layers = [(logits, chosen), (logits.flip(1), E - 1 - chosen)]
    assert measure(layers, pooled=True) == pytest.approx(K)
    assert measure(layers, pooled=False) == pytest.approx(E, rel=1e-3)


def test_masked_tokens_count_nothing():
    logits, chosen = (torch.cat(parts) for parts in zip(even(), crowded(), strict=True))
    mask = torch.tensor([1, 0]).repeat_interleave(T).view(2, T)
    assert measure([(logits, chosen)], attention_mask=mask) == pytest.approx(K)
    assert measure([(logits, chosen)]) > K + 0.2


def test_its_gradient_moves_tokens_away_from_the_crowd():
    logits = torch.tensor([0.5, 0.4, 0.3, 0.2]).repeat(T, 1).requires_grad_()
    measure_imbalance([logits], [torch.tensor([0, 1]).expand(T, K)], pooled=False).backward()
    assert (logits.grad[0, :2] > 0).all()
    assert (logits.grad[0, 2:] < 0).all()
