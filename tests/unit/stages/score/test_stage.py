from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch

from stages.artifacts.carve import NeuronStatistics, Scores
from stages.artifacts.job import Job
from stages.score.config import ScoreConfig
from stages.score.stage import MEASURES, gradient_rate, ranks, run, score_neurons, score_random, score_synergy

VALUES_LF = torch.tensor([[4.0, 1.0, 1.0, 10.0, 2.0], [-3.0, 5.0, 0.0, 5.0, 1.0]])


def test_ties_share_the_mean_of_their_ranks():
    expected = [[0.75, 0.125, 0.125, 1.0, 0.5], [0.0, 0.875, 0.25, 0.875, 0.5]]
    assert ranks(VALUES_LF).tolist() == expected


def test_a_layer_without_spread_is_zero_and_leaves_the_other_alone():
    scaled_LF = ranks(torch.stack([torch.full((5,), 0.1), VALUES_LF[1]]))
    assert scaled_LF[0].tolist() == [0.0] * 5
    assert torch.equal(scaled_LF[1], ranks(VALUES_LF)[1])


def test_rounding_is_no_spread():
    assert not ranks(torch.tensor([[0.1 + 0.2, 0.3, 0.3]], dtype=torch.float64)).any()
    assert ranks(torch.tensor([[3.0]])).tolist() == [[0.0]]


# One layer of four neurons: ranks 0, 1, 2, 3; 3, 1½, 0, 1½; 0, 3, 2, 1 thirds.
ACTIVATION = torch.tensor([[0.0, 0.2, 0.6, 1.0]])
GRADIENT = torch.tensor([[1.0, 0.5, 0.0, 0.5]])
FREQUENCY = torch.tensor([[0.0, 1.0, 0.5, 0.1]])
SCORE = ScoreConfig(activation_weight=2.0, gradient_weight=0.5, frequency_weight=1.0)


def score(activation=ACTIVATION, gradients=(GRADIENT,), frequency=FREQUENCY, **options):
    return score_synergy(activation, list(gradients), frequency, replace(SCORE, **options))[0]


def test_the_score_by_hand():
    torch.testing.assert_close(score(), torch.tensor([-1.5, 4.25, 6.0, 6.25]) / 3)


def test_more_activation_more_frequency_and_less_gradient_score_higher():
    steps, flat = torch.arange(4.0)[None], torch.ones(1, 4)
    for s_p in (score(steps, (flat,), flat), score(flat, (-steps,), 1 + steps), score(flat, (flat,), steps)):
        assert s_p.isfinite().all()
        assert (s_p.diff() > 0).all()


def test_a_scan_without_gradients_keeps_the_order_of_the_other_terms():
    zeros = torch.zeros(1, 4)
    torch.testing.assert_close(score(gradients=(zeros, zeros, zeros)), score(gradient_weight=0.0))


def test_the_gradient_rate_takes_out_what_activation_alone_explains():
    activation = torch.tensor([[0.5, 1.0, 4.0, 2.0]], dtype=torch.float64)
    rate = gradient_rate(activation * torch.tensor([3.0, 3.0, 3.0, 6.0]), activation)
    expected = torch.log(torch.tensor([[3.0, 3.0, 3.0, 6.0]], dtype=torch.float64))
    torch.testing.assert_close(rate, expected, rtol=0, atol=1e-4)


def test_the_gradient_rate_of_neurons_that_are_never_active_is_finite_and_of_a_layer_without_gradients_0():
    norms, activation = torch.tensor([[0.0, 2.0, 1.0], [0.0, 0.0, 0.0]]), torch.tensor([[0.0, 1.0, 2.0]]).expand(2, 3)
    rate = gradient_rate(norms, activation)
    assert rate.isfinite().all()
    assert rate[0, 2] < rate[0, 0] < rate[0, 1]
    assert not rate[1].any()


T, F = 5, 3


def test_controls_against_their_definitions():
    generator = torch.Generator().manual_seed(0)
    h_TF, gradient_TF = torch.randn(2, T, F, generator=generator, dtype=torch.float64)
    down_DF = torch.randn(4, F, generator=generator)
    sums = SimpleNamespace(
        tokens=T,
        sum_abs=h_TF.abs().sum(0)[None],
        sum_sq=h_TF.square().sum(0)[None],
        sum_taylor=(h_TF * gradient_TF).abs().sum(0)[None],
        weight_norm_down=down_DF.norm(dim=0)[None],
        active_count=torch.tensor([[0, 5, 2]]),
    )
    # ‖column‖·rms is the norm over the column of Wanda's |W|·‖x‖, divided by √T.
    per_weight_DF = down_DF.abs() * h_TF.norm(dim=0).float()
    for method, expected in (
        ("taylor", (h_TF * gradient_TF).abs().mean(0).float()),
        ("wanda", per_weight_DF.norm(dim=0) / T**0.5),
    ):
        torch.testing.assert_close(MEASURES[method](sums, ScoreConfig(), 0)[0], expected)
    outputs_TFD = h_TF[:, :, None].float() * down_DF.T
    torch.testing.assert_close(NeuronStatistics.contribution.fget(sums)[0], outputs_TFD.norm(dim=2).mean(0))
    assert NeuronStatistics.frequency.fget(sums).tolist() == [[0.0, 1.0, 0.4000000059604645]]


def test_random_scores_are_seeded_and_no_layer_depends_on_another():
    scores_LF = score_random(3, 8, seed=4)
    assert torch.equal(scores_LF, score_random(3, 8, seed=4))
    assert torch.equal(scores_LF[:2], score_random(2, 8, seed=4))
    assert not torch.equal(scores_LF, score_random(3, 8, seed=5))
    assert len(scores_LF.unique()) == 24
    assert scores_LF.dtype == torch.float32


@pytest.fixture
def job(tmp_path):
    for name in ("scan", "out", "scratch"):
        (tmp_path / name).mkdir()
    return Job({"scan": tmp_path / "scan"}, tmp_path / "out", tmp_path / "scratch")


@pytest.mark.parametrize("method", MEASURES)
def test_the_measure_that_was_asked_for_is_written(job, make_statistics, method):
    statistics = make_statistics()
    statistics.save(job.parents["scan"])
    table = run(job, score=ScoreConfig(method=method), seed=1)
    scores = Scores.load(job.out)
    assert (scores.method, scores.description) == (method, method)
    assert scores.chosen.shape == statistics.sum_abs.shape
    assert scores.chosen.dtype == torch.float32
    assert scores.chosen.isfinite().all()
    columns = ["layer", f"{method} 5 %", "median", "95 %", "neurons never active"]
    assert table.columns == columns
    assert [row[0] for row in table.rows] == [0, 1]
    assert [row[4] for row in table.rows] == ["28.6%", "0.0%"]
    assert table.notes == [f"scored by {method}"]


def test_every_measure_is_another(make_statistics):
    assert set(MEASURES) == set(ScoreConfig.__dataclass_fields__["method"].metadata["choices"])
    found = [score_neurons(make_statistics(), ScoreConfig(method=method), 1).chosen for method in MEASURES]
    assert not any(torch.equal(one, other) for one, other in combinations(found, 2))


def test_a_forward_only_scan_scores_without_gradients_and_says_so(job, make_statistics):
    make_statistics(gradient=False).save(job.parents["scan"])
    run(job, score=ScoreConfig(), seed=1)
    scores = Scores.load(job.out)
    assert scores.chosen.isfinite().all()
    assert scores.description == "s_p without its gradient term (the scan was forward-only)"


@pytest.mark.parametrize("weight", ["activation_weight", "gradient_weight", "frequency_weight"])
def test_every_weight_reaches_the_score(make_statistics, weight):
    plain, other = (score_neurons(make_statistics(), ScoreConfig(**given), 1).chosen for given in ({}, {weight: 0.0}))
    assert not torch.equal(plain.argsort(stable=True), other.argsort(stable=True))
