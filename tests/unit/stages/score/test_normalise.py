import pytest
import torch

from stages.score.stage import normalise

VALUES_LF = torch.tensor([[4.0, 1.0, 1.0, 10.0, 2.0], [-3.0, 5.0, 0.0, 5.0, 1.0]])


def test_zscore_has_mean_zero_and_deviation_one_in_every_layer():
    scaled_LF = normalise(VALUES_LF, "zscore")
    torch.testing.assert_close(scaled_LF.mean(1), torch.zeros(2, dtype=torch.float64))
    torch.testing.assert_close(scaled_LF.std(1, correction=0), torch.ones(2, dtype=torch.float64))


def test_ranks_run_from_0_to_1_and_ties_share_their_mean():
    expected = [[0.75, 0.125, 0.125, 1.0, 0.5], [0.0, 0.875, 0.25, 0.875, 0.5]]
    assert normalise(VALUES_LF, "rank").tolist() == expected


def test_minmax_runs_from_0_to_1():
    expected = [[3 / 9, 0.0, 0.0, 1.0, 1 / 9], [0.0, 1.0, 0.375, 1.0, 0.5]]
    torch.testing.assert_close(normalise(VALUES_LF, "minmax"), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("method", ["zscore", "rank", "minmax"])
def test_a_layer_without_spread_is_zero_and_leaves_the_other_alone(method):
    flat_LF = torch.stack([torch.full((5,), 0.1), VALUES_LF[1]])
    scaled_LF = normalise(flat_LF, method)
    assert scaled_LF[0].tolist() == [0.0] * 5
    assert torch.equal(scaled_LF[1], normalise(VALUES_LF, method)[1])


def test_rounding_is_no_spread():
    assert not normalise(torch.tensor([[0.1 + 0.2, 0.3, 0.3]], dtype=torch.float64), "zscore").any()


def test_a_single_neuron_has_no_spread():
    assert normalise(torch.tensor([[3.0]]), "rank").tolist() == [[0.0]]
