"""score: read neuron statistics, write the measure that neurons are ranked by."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from instruments.errors import ConfigError
from stages.artifacts.job import Job, Table
from stages.artifacts.statistics import NeuronStatistics, Scores
from stages.score.config import ScoreConfig
from stages.score.scores import (
    SynergyWeights,
    gradient_rate,
    has_logit_std,
    normalise,
    score_contribution,
    score_frequency,
    score_random,
    score_synergy,
    score_taylor,
    score_wanda,
)


def rank_correlation(first_LF: Float[Tensor, "L F"], second_LF: Float[Tensor, "L F"]) -> list[float | None]:
    """Spearman's rank correlation of two measures in every layer; None where one of them has no spread."""
    ranks = (normalise(normalise(values_LF, "rank"), "zscore") for values_LF in (first_LF, second_LF))
    correlation_L = (next(ranks) * next(ranks)).mean(1)
    defined_L1 = has_logit_std(first_LF) & has_logit_std(second_LF)
    return [value if ok else None for value, ok in zip(correlation_L.tolist(), defined_L1[:, 0].tolist(), strict=True)]


WITHOUT_GRADIENT = "s_p without its gradient term (the scan was forward-only)"


def run(job: Job, *, score: ScoreConfig, seed: int) -> Table:
    """Score every neuron of every layer."""
    statistics = NeuronStatistics.load(job.parents["scan"])
    if score.needs_gradients and not statistics.samples_with_gradient:
        raise ConfigError(
            f"score.method={score.method} needs gradients; the scan was forward-only",
            where="stage=score",
            do="scan=default, or score=contribution",
        )
    scores = score_neurons(statistics, score, seed)
    scores.save(job.out)
    return summarise(scores, statistics)


def score_neurons(statistics: NeuronStatistics, score: ScoreConfig, seed: int) -> Scores:
    """The score that `score.method` names."""
    return Scores(score.method, describe(score, statistics), MEASURES[score.method](statistics, score, seed))


def measure_synergy(statistics: NeuronStatistics, score: ScoreConfig, _seed: int) -> Tensor:
    """S_p."""
    tokens, samples = statistics.tokens, max(1, statistics.samples_with_gradient)
    activation_LF = statistics.sum_abs / tokens * statistics.weight_norm_down
    kinds = (statistics.grad_norm_gate, statistics.grad_norm_up, statistics.grad_norm_down)
    gradients_LF = [gradient_rate(norms_LF / samples, activation_LF) for norms_LF in kinds]
    return score_synergy(
        activation_LF,
        gradients_LF,
        score_frequency(statistics.active_count, tokens),
        weights=SynergyWeights(score.activation_weight, score.gradient_weight, score.frequency_weight),
        form=score.form,  # type: ignore[arg-type] # checked against the choices beside the field
        normalisation=score.normalisation,  # type: ignore[arg-type]
    )


def measure_contribution(statistics: NeuronStatistics, _score: ScoreConfig, _seed: int) -> Tensor:
    """Mean |h|·‖d‖."""
    return score_contribution(statistics.sum_abs, statistics.weight_norm_down, statistics.tokens)


def measure_taylor(statistics: NeuronStatistics, _score: ScoreConfig, _seed: int) -> Tensor:
    """Mean |h·∂loss/∂h|."""
    return score_taylor(statistics.sum_taylor, statistics.tokens)


# (L, F) fp32 by the name of the method.
MEASURES: dict[str, Callable[[NeuronStatistics, ScoreConfig, int], Tensor]] = {
    "s_p": measure_synergy,
    "taylor": measure_taylor,
    "wanda": lambda statistics, *_: score_wanda(statistics.sum_sq, statistics.weight_norm_down, statistics.tokens),
    "frequency": lambda statistics, *_: score_frequency(statistics.active_count, statistics.tokens),
    "contribution": measure_contribution,
    "random": lambda statistics, _, seed: score_random(len(statistics.sum_abs), statistics.sum_abs.shape[1], seed),
}


def describe(score: ScoreConfig, statistics: NeuronStatistics) -> str:
    """The score in words, with what it lacks."""
    lacks = score.method == "s_p" and score.gradient_weight > 0 and not statistics.samples_with_gradient
    return WITHOUT_GRADIENT if lacks else score.method


def summarise(scores: Scores, statistics: NeuronStatistics) -> Table:
    """One row per layer: how the score spreads, and how far it agrees with contribution and Taylor."""
    spread_L3 = scores.chosen.quantile(torch.tensor([0.05, 0.5, 0.95]), dim=1).T
    silent_L = (statistics.active_count == 0).float().mean(1)
    with_contribution = rank_correlation(scores.chosen, measure_contribution(statistics, ScoreConfig(), 0))
    with_taylor = rank_correlation(scores.chosen, measure_taylor(statistics, ScoreConfig(), 0))
    rows = [
        [
            layer,
            *(f"{value:.3g}" for value in spread_L3[layer]),
            f"{silent_L[layer]:.1%}",
            shown(with_contribution[layer]),
            shown(with_taylor[layer]),
        ]
        for layer in range(len(scores.chosen))
    ]
    columns = ["layer", f"{scores.method} 5 %", "median", "95 %", "neurons never active", "ρ contribution", "ρ taylor"]
    notes = [f"scored by {scores.description}; ρ is the rank correlation of this score with the measure"]
    if not statistics.samples_with_gradient:
        notes.append("the scan was forward-only: taylor is 0 throughout")
    return Table("score", columns, rows, notes)


def shown(correlation: float | None) -> str:
    """A correlation for the table."""
    return "–" if correlation is None else f"{correlation:+.2f}"
