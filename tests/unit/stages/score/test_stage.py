import pytest
import torch

from models.errors import ConfigError
from stages.contracts.job import Job
from stages.contracts.scores import Scores
from stages.score.config import ScoreConfig
from stages.score.stage import run


@pytest.fixture
def job(tmp_path):
    for name in ("scan", "out", "scratch"):
        (tmp_path / name).mkdir()
    return Job({"scan": tmp_path / "scan"}, tmp_path / "out", tmp_path / "scratch")


def test_all_measures_are_written_and_the_method_chooses(job, make_statistics):
    statistics = make_statistics()
    statistics.save(job.parents["scan"])
    table = run(job, score=ScoreConfig(method="wanda"), seed=1)
    scores = Scores.load(job.out)
    assert torch.equal(scores.chosen, scores.wanda)
    for measure in (scores.s_p, scores.taylor, scores.wanda, scores.frequency, scores.contribution, scores.random):
        assert measure.shape == statistics.sum_abs.shape
        assert measure.dtype == torch.float32
        assert measure.isfinite().all()
    torch.testing.assert_close(scores.frequency[1, 5], torch.tensor(1.0))
    assert table.columns == ["layer", "S_p 5 %", "median", "95 %", "units never active", "ρ contribution", "ρ taylor"]
    assert [row[0] for row in table.rows] == [0, 1]
    assert [row[4] for row in table.rows] == ["28.6%", "0.0%"]
    assert table.notes == ["later stages rank by wanda; ρ is the rank correlation of S_p with the measure"]


def test_weights_reach_the_score(job, make_statistics):
    make_statistics().save(job.parents["scan"])
    run(job, score=ScoreConfig(activation_weight=0.0, gradient_weight=0.0, frequency_weight=1.0), seed=1)
    scores = Scores.load(job.out)
    assert torch.equal(scores.s_p.argsort(stable=True), scores.frequency.argsort(stable=True))


def test_runs_are_reproducible(job, make_statistics):
    make_statistics().save(job.parents["scan"])
    run(job, score=ScoreConfig(), seed=1)
    first = vars(Scores.load(job.out))
    run(job, score=ScoreConfig(), seed=1)
    second = vars(Scores.load(job.out))
    assert first.pop("method") == second.pop("method")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_forward_only_scan_scores_without_gradients_and_says_so(job, make_statistics):
    make_statistics(gradient=False).save(job.parents["scan"])
    table = run(job, score=ScoreConfig(), seed=1)
    assert Scores.load(job.out).s_p.isfinite().all()
    assert [row[-1] for row in table.rows] == ["–", "–"]
    assert table.notes[1] == "the scan was forward-only: S_p has no gradient term, taylor is 0 throughout"


def test_taylor_cannot_be_asked_of_a_forward_only_scan(job, make_statistics):
    make_statistics(gradient=False).save(job.parents["scan"])
    with pytest.raises(ConfigError) as error:
        run(job, score=ScoreConfig(method="taylor"), seed=1)
    assert str(error.value) == (
        "score.method=taylor needs gradients; the scan was forward-only\n"
        "  where: stage=score\n"
        "  do:    scan=default, or score=contribution"
    )
    assert not list(job.out.iterdir())
