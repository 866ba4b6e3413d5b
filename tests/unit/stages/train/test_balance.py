import pytest
import torch
from torch import nn

from models.training import Routing
from stages.train.objective import balance_loss, count_load, entropy, move_biases, sticky_loss, z_loss


def routing(logits, top_k=2):
    logits = torch.tensor(logits)
    return Routing(logits, logits.topk(top_k, dim=1).indices)


@pytest.fixture
def uneven():
    return [routing([[3.0, 2.0, 0.0], [4.0, 1.0, 0.0], [0.0, 9.0, 8.0]])]


def test_padding_loads_nobody(uneven):
    assert count_load(uneven, torch.arange(2)).tolist() == [[2, 2, 0]]
    assert count_load(uneven, torch.arange(3)).tolist() == [[2, 3, 1]]


def test_even_load_costs_1_for_any_number_of_experts():
    even = [routing([[0.0, 0.0, 0.0, 0.0]] * 4, top_k=1)]
    even = [Routing(even[0].logits_TE, torch.tensor([[0], [1], [2], [3]]))]
    rows = torch.arange(4)
    assert balance_loss(even, count_load(even, rows), rows) == pytest.approx(1.0)


def test_balance_loss_is_its_formula_and_pushes_down_the_loaded(uneven):
    logits = uneven[0].logits_TE.clone().requires_grad_()
    routed, rows = [Routing(logits, uneven[0].chosen_TK)], torch.arange(3)
    loss = balance_loss(routed, count_load(routed, rows), rows)
    share = torch.tensor([2.0, 3.0, 1.0]) / 6
    torch.testing.assert_close(loss, 3 * (share * logits.softmax(1).mean(0)).sum())
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient[:, 1].sum() > 0 > gradient[:, 2].sum()


def test_layers_of_a_pool_balance_each_other():
    first, second = routing([[9.0, 0.0]], top_k=1), routing([[0.0, 9.0]], top_k=1)
    rows, both = torch.arange(1), [first, second]
    load = count_load(both, rows)
    assert balance_loss(both, load, rows) == pytest.approx(2.0, rel=1e-3)
    assert balance_loss(both, load, rows, pooled=True) == pytest.approx(1.0)


def test_z_loss_and_entropy_of_equal_logits():
    equal, rows = [routing([[0.0] * 5] * 2)], torch.arange(2)
    assert z_loss(equal, rows) == pytest.approx(torch.tensor(5.0).log().square().item())
    assert entropy(equal, rows) == pytest.approx(torch.tensor(5.0).log().item())


def test_the_sticky_loss_is_its_formula_on_neighbours_alone():
    """Two sequences of three positions, the second with padding at its end."""
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    routed, rows = [Routing(logits, logits.topk(2, dim=1).indices)], torch.arange(5)
    log = (logits / logits.std(1, keepdim=True)).log_softmax(1)
    expected = torch.stack([-log[token][routed[0].chosen_TK[token - 1]].mean() for token in (1, 2, 4)]).mean()
    loss = sticky_loss(routed, rows, 3)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(sticky_loss([Routing(9 * logits, routed[0].chosen_TK)], rows, 3), loss)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert not gradient[[0, 3, 5]].any()
    assert gradient[1][routed[0].chosen_TK[0]].sum() < 0


def test_biases_move_against_the_load_and_keep_their_mean():
    router = nn.Module()
    router.register_buffer("e_score_correction_bias", torch.zeros(4))
    move_biases([router], torch.tensor([[9, 1, 4, 2]]), 0.5)
    bias = router.e_score_correction_bias
    assert bias.sum() == 0
    assert bias[0] < bias[2] < bias[1] == bias[3]
