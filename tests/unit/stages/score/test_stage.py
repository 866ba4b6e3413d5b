from itertools import combinations

import pytest
import torch

from instruments.errors import ConfigError
from stages.artifacts.carve import Scores
from stages.artifacts.job import Job
from stages.score.config import ScoreConfig
from stages.score.stage import MEASURES, run, score_neurons


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
    columns = ["layer", f"{method} 5 %", "median", "95 %", "neurons never active", "ρ contribution", "ρ taylor"]
    assert table.columns == columns
    assert [row[0] for row in table.rows] == [0, 1]
    assert [row[4] for row in table.rows] == ["28.6%", "0.0%"]
    own = {"contribution": 5, "taylor": 6}
    assert all(row[own[method]] == "+1.00" for row in table.rows if method in own)
    assert table.notes == [f"scored by {method}; ρ is the rank correlation of this score with the measure"]


def test_every_measure_is_another(make_statistics):
    assert set(MEASURES) == set(ScoreConfig.__dataclass_fields__["method"].metadata["choices"])
    found = [score_neurons(make_statistics(), ScoreConfig(method=method), 1).chosen for method in MEASURES]
    assert not any(torch.equal(one, other) for one, other in combinations(found, 2))


def test_statistics_know_the_measures_that_tables_show(make_statistics):
    statistics = make_statistics()
    for method in ("contribution", "frequency"):
        scores = score_neurons(statistics, ScoreConfig(method=method), 0)
        torch.testing.assert_close(getattr(statistics, method), scores.chosen)


def test_weights_reach_the_score(make_statistics):
    often = ScoreConfig(activation_weight=0.0, gradient_weight=0.0, frequency_weight=1.0)
    scores_LF = score_neurons(make_statistics(), often, 1).chosen
    assert torch.equal(scores_LF.argsort(stable=True), make_statistics().frequency.argsort(stable=True))


def test_runs_are_reproducible(make_statistics):
    first, second = (score_neurons(make_statistics(), ScoreConfig(method="random"), 1) for _ in range(2))
    assert torch.equal(first.chosen, second.chosen)


def test_a_forward_only_scan_scores_without_gradients_and_says_so(job, make_statistics):
    make_statistics(gradient=False).save(job.parents["scan"])
    table = run(job, score=ScoreConfig(), seed=1)
    scores = Scores.load(job.out)
    assert scores.chosen.isfinite().all()
    assert scores.description == "s_p without its gradient term (the scan was forward-only)"
    assert [row[-1] for row in table.rows] == ["–", "–"]
    assert table.notes == [
        "scored by s_p without its gradient term (the scan was forward-only); ρ is the rank correlation of this score "
        "with the measure",
        "the scan was forward-only: taylor is 0 throughout",
    ]


def test_nothing_is_missed_of_a_forward_only_scan_that_no_term_asks_for(make_statistics):
    scores = score_neurons(make_statistics(gradient=False), ScoreConfig(gradient_weight=0), 1)
    assert scores.description == "s_p"


@pytest.mark.parametrize(
    "score", [ScoreConfig("taylor"), ScoreConfig(activation_weight=0, frequency_weight=0)], ids=["taylor", "gradient"]
)
def test_gradients_cannot_be_asked_of_a_forward_only_scan(job, make_statistics, score):
    make_statistics(gradient=False).save(job.parents["scan"])
    with pytest.raises(ConfigError) as error:
        run(job, score=score, seed=1)
    assert str(error.value) == (
        f"score.method={score.method} needs gradients; the scan was forward-only\n"
        "  where: stage=score\n"
        "  do:    scan=default, or score=contribution"
    )
    assert not list(job.out.iterdir())


@pytest.mark.parametrize("setting", [{"form": "product"}, {"normalisation": "zscore"}, {"gradient_weight": 0.0}])
def test_what_the_terms_are_reaches_the_score(make_statistics, setting):
    plain, other = (score_neurons(make_statistics(), ScoreConfig(**given), 1).chosen for given in ({}, setting))
    assert not torch.equal(plain.argsort(stable=True), other.argsort(stable=True))
