"""score: read unit statistics, write S_p and the measures beside it."""

import torch

from models.errors import ConfigError
from stages.contracts.job import Job, Table
from stages.contracts.scores import Scores
from stages.contracts.statistics import UnitStatistics
from stages.score.config import ScoreConfig
from stages.score.controls import score_contribution, score_frequency, score_random, score_taylor, score_wanda
from stages.score.summary import rank_correlation
from stages.score.synergy import SynergyWeights, score_synergy


def run(job: Job, *, score: ScoreConfig, seed: int) -> Table:
    """Score every unit of every layer by every measure."""
    statistics = UnitStatistics.load(job.parents["scan"])
    if score.method == "taylor" and not statistics.samples_with_gradient:
        raise ConfigError(
            "score.method=taylor needs gradients; the scan was forward-only",
            where="stage=score",
            do="scan=default, or score=contribution",
        )
    scores = score_units(statistics, score, seed)
    scores.save(job.out)
    return summarise(scores, statistics)


def score_units(statistics: UnitStatistics, score: ScoreConfig, seed: int) -> Scores:
    """All measures; `score.method` is the one that later stages rank by."""
    tokens, samples = statistics.tokens, max(1, statistics.samples_with_gradient)
    frequency_LF = score_frequency(statistics.active_count, tokens)
    s_p_LF = score_synergy(
        statistics.sum_abs / tokens,
        [norms / samples for norms in (statistics.grad_norm_gate, statistics.grad_norm_up, statistics.grad_norm_down)],
        frequency_LF,
        weights=SynergyWeights(score.activation_weight, score.gradient_weight, score.frequency_weight),
        form=score.form,  # type: ignore[arg-type] # checked against the choices beside the field
        normalisation=score.normalisation,  # type: ignore[arg-type]
    )
    return Scores(
        method=score.method,
        s_p=s_p_LF,
        taylor=score_taylor(statistics.sum_taylor, tokens),
        wanda=score_wanda(statistics.sum_sq, statistics.weight_norm_down, tokens),
        frequency=frequency_LF,
        contribution=score_contribution(statistics.sum_abs, statistics.weight_norm_down, tokens),
        random=score_random(len(s_p_LF), s_p_LF.shape[1], seed),
    )


def summarise(scores: Scores, statistics: UnitStatistics) -> Table:
    """One row per layer: how S_p spreads, and how far it agrees with the plain measures."""
    spread_L3 = scores.s_p.quantile(torch.tensor([0.05, 0.5, 0.95]), dim=1).T
    silent_L = (statistics.active_count == 0).float().mean(1)
    with_contribution = rank_correlation(scores.s_p, scores.contribution)
    with_taylor = rank_correlation(scores.s_p, scores.taylor)
    rows = [
        [
            layer,
            *(f"{value:.2f}" for value in spread_L3[layer]),
            f"{silent_L[layer]:.1%}",
            shown(with_contribution[layer]),
            shown(with_taylor[layer]),
        ]
        for layer in range(len(scores.s_p))
    ]
    columns = ["layer", "S_p 5 %", "median", "95 %", "units never active", "ρ contribution", "ρ taylor"]
    notes = [f"later stages rank by {scores.method}; ρ is the rank correlation of S_p with the measure"]
    if not statistics.samples_with_gradient:
        notes.append("the scan was forward-only: S_p has no gradient term, taylor is 0 throughout")
    return Table("score", columns, rows, notes)


def shown(correlation: float | None) -> str:
    """A correlation for the table."""
    return "–" if correlation is None else f"{correlation:+.2f}"
