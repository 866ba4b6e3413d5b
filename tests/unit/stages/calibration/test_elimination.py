"""Elimination of neurons against exhaustive refits."""

import pytest
import torch
from tensor_memory import peak_of_tensors

from models.ffn import DenseFFN
from stages.calibration import elimination
from stages.calibration.elimination import rank_by_alignment, rank_by_elimination

D, F, T = 5, 14, 400


@pytest.fixture
def hidden_TF():
    """Neuron 7 is nearly a copy of neuron 0; neuron 3 is always 0."""
    hidden_TF = torch.randn(T, F, generator=torch.Generator().manual_seed(0))
    hidden_TF[:, 7] = hidden_TF[:, 0] + 0.01 * hidden_TF[:, 7]
    hidden_TF[:, 3] = 0
    return hidden_TF


@pytest.fixture
def down_DF():
    return torch.randn(D, F, generator=torch.Generator().manual_seed(1))


def refit_error(hidden_TF, down_DF, kept):
    wanted_TD = hidden_TF @ down_DF.T
    fitted = torch.linalg.lstsq(hidden_TF[:, kept].double(), wanted_TD.double(), driver="gelsd").solution
    return float((hidden_TF[:, kept].double() @ fitted - wanted_TD).square().sum())


def test_what_others_can_say_goes_first(hidden_TF, down_DF):
    ranks_F = rank_by_elimination(hidden_TF.T @ hidden_TF, down_DF, keep=6)
    assert ranks_F.sort().values.tolist() == list(range(F))
    assert int(ranks_F.argmin()) == 3
    assert min(int(ranks_F[0]), int(ranks_F[7])) == 1


def test_one_at_a_time_the_cheapest_neuron_goes(hidden_TF, down_DF, monkeypatch):
    monkeypatch.setattr(elimination, "PENALTY", 1e-9)
    ranks_F = rank_by_elimination(hidden_TF.T @ hidden_TF, down_DF, keep=9)
    left = list(range(F))
    for step in range(F - 9):
        gone = int((ranks_F == step).nonzero())
        cheapest = min(refit_error(hidden_TF, down_DF, [i for i in left if i != neuron]) for neuron in left)
        left.remove(gone)
        assert refit_error(hidden_TF, down_DF, left) == pytest.approx(cheapest, rel=1e-2, abs=1e-2)


def test_blocks_leave_the_exact_refit_of_what_stays(hidden_TF, down_DF):
    """Four neurons are dropped at once, as one block."""
    inverse_UU = elimination._invert(hidden_TF.T @ hidden_TF)
    out_u, stay = torch.tensor([2, 5, 9, 11]), torch.ones(F, dtype=torch.bool)
    stay[out_u] = False
    columns_UD = down_DF.T.clone()
    elimination._drop(inverse_UU, columns_UD, out_u)
    gram_FF = (hidden_TF.T @ hidden_TF).double()
    gram_FF.diagonal().add_(elimination.PENALTY * gram_FF.diagonal().mean())
    exact_UU = torch.linalg.inv(gram_FF[stay][:, stay])
    torch.testing.assert_close(inverse_UU[stay][:, stay].double(), exact_UU, rtol=1e-3, atol=1e-6)
    exact_UD = down_DF.T[stay].double() + exact_UU @ gram_FF[stay][:, ~stay] @ down_DF.T[~stay].double()
    torch.testing.assert_close(columns_UD[stay].double(), exact_UD, rtol=1e-3, atol=1e-4)


def test_ranking_sums_over_batches_and_costs_nothing_where_all_stay():
    generator = torch.Generator().manual_seed(2)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    ffn, x_TD = DenseFFN(draw(F, D), draw(F, D), draw(D, F), torch.nn.functional.silu), draw(T, D)
    whole_F, parts_F = (rank_by_alignment(ffn, inputs, 4) for inputs in ([x_TD], x_TD.split(150)))
    assert torch.equal(whole_F, parts_F)
    assert torch.equal(rank_by_alignment(ffn, [], F), torch.ones(F))


def test_the_inverse_needs_one_matrix_in_fp64_beside_the_moments():
    width = 400
    hidden_TF = torch.randn(500, width, generator=torch.Generator().manual_seed(3))
    gram_FF = hidden_TF.T @ hidden_TF
    peak = peak_of_tensors(lambda: rank_by_elimination(gram_FF, torch.ones(D, width), keep=100))
    assert peak <= 1.1 * 8 * width**2
