"""score: read neuron statistics, write the score that ranks neurons: S_p, or a simple measure."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from stages.artifacts.carve import NeuronStatistics, Scores
from stages.artifacts.job import Job, Table
from stages.score.config import ScoreConfig


def ranks(values_LF: Shaped[Tensor, "L F"]) -> Float[Tensor, "L F"]:
    """Ranks of the finite values within each layer: 0 lowest, 1 highest; ties share the mean of their ranks.

    Returns:
        ``(L, F)`` fp64; 0 in a layer whose values differ by rounding alone.
    """
    values_LF = values_LF.double().contiguous()
    low_L1, high_L1 = values_LF.aminmax(dim=1, keepdim=True)
    varies_L1 = high_L1 - low_L1 > 1e-12 * torch.maximum(low_L1.abs(), high_L1.abs())
    sorted_LF = values_LF.sort(dim=1).values
    below_LF, upto_LF = (torch.searchsorted(sorted_LF, values_LF, right=right) for right in (False, True))
    ranks_LF = (below_LF + upto_LF - 1).double() / 2
    return torch.where(varies_L1, ranks_LF / (values_LF.shape[1] - 1), 0.0)


def score_synergy(
    activation_LF: Float[Tensor, "L F"],
    gradients_LF: Sequence[Float[Tensor, "L F"]],
    frequency_LF: Float[Tensor, "L F"],
    score: ScoreConfig,
) -> Float[Tensor, "L F"]:
    """S_p = a·A − g·G + f·F, each term ranked within its layer; one that is constant there does not affect the order.

    A is mean |h|·‖d‖; F is the share of tokens where the neuron is among the most active; G is the mean of the ranks of
    `gradient_rate` of gate, up and down weights, ranked separately so that the largest gradients do not dominate.
    Returns:
        ``(L, F)`` fp32, finite; comparable within a layer only.
    """
    gradient_LF = torch.stack([ranks(kind_LF) for kind_LF in gradients_LF]).mean(0)
    a_LF, g_LF, f_LF = (ranks(term_LF) for term_LF in (activation_LF, gradient_LF, frequency_LF))
    weighted_LF = score.activation_weight * a_LF - score.gradient_weight * g_LF + score.frequency_weight * f_LF
    return weighted_LF.float()


def gradient_rate(norms_LF: Float[Tensor, "L F"], activation_LF: Float[Tensor, "L F"]) -> Float[Tensor, "L F"]:
    """log(‖∇W‖ / activation): the gradient relative to the neuron's contribution.

    High activation alone makes weight gradients large; the ratio removes this effect. Neurons that are never active get
    about the layer's mean; a layer without gradients gets 0.
    """
    norms_LF, activation_LF = (values + 1e-6 * values.mean(1, keepdim=True) for values in (norms_LF, activation_LF))
    tiny = torch.finfo(norms_LF.dtype).tiny
    rate_LF = norms_LF.clamp_min(tiny).log() - activation_LF.clamp_min(tiny).log()
    return torch.where(norms_LF.any(1, keepdim=True), rate_LF, 0.0)


def score_random(layers: int, width: int, seed: int) -> Float[Tensor, "L F"]:
    """Seeded uniform noise in 0..1; every layer has its own random stream."""
    rows = [np.random.default_rng((seed, layer)).random(width, dtype=np.float32) for layer in range(layers)]
    return torch.from_numpy(np.stack(rows))


def run(job: Job, *, score: ScoreConfig, seed: int) -> Table:
    """Score every neuron of every layer."""
    statistics = NeuronStatistics.load(job.parents["scan"])
    scores = score_neurons(statistics, score, seed)
    scores.save(job.out)
    return summarise(scores, statistics)


def score_neurons(statistics: NeuronStatistics, score: ScoreConfig, seed: int) -> Scores:
    """Scores by the measure `score.method`; the description says so if the gradient term is missing."""
    lacks = score.method == "s_p" and score.gradient_weight > 0 and not statistics.samples_with_gradient
    said = "s_p without its gradient term (the scan was forward-only)" if lacks else score.method
    return Scores(score.method, said, MEASURES[score.method](statistics, score, seed))


def measure_synergy(statistics: NeuronStatistics, score: ScoreConfig, _seed: int) -> Tensor:
    """S_p."""
    tokens, samples = statistics.tokens, max(1, statistics.samples_with_gradient)
    activation_LF = statistics.sum_abs / tokens * statistics.weight_norm_down
    kinds = (statistics.grad_norm_gate, statistics.grad_norm_up, statistics.grad_norm_down)
    gradients_LF = [gradient_rate(norms_LF / samples, activation_LF) for norms_LF in kinds]
    return score_synergy(activation_LF, gradients_LF, statistics.frequency, score)


# Method name → function that returns (L, F) fp32.
MEASURES: dict[str, Callable[[NeuronStatistics, ScoreConfig, int], Tensor]] = {
    "s_p": measure_synergy,
    # First-order loss change without the neuron: arXiv:1611.06440 eq. 5; differs: absolute value inside the mean.
    "taylor": lambda sums, *_: (sums.sum_taylor / sums.tokens).float(),
    # ‖d_j‖·rms(h_j): arXiv:2306.11695 eq. 1; differs: one score for the whole column d_j instead of one per weight.
    "wanda": lambda sums, *_: ((sums.sum_sq / sums.tokens).sqrt() * sums.weight_norm_down).float(),
    "frequency": lambda statistics, *_: statistics.frequency,
    "contribution": lambda statistics, *_: statistics.contribution,
    "random": lambda statistics, _, seed: score_random(len(statistics.sum_abs), statistics.sum_abs.shape[1], seed),
}


def summarise(scores: Scores, statistics: NeuronStatistics) -> Table:
    """One row per layer: quantiles of the score, and neurons that are never active."""
    rows = []
    for layer, own_F in enumerate(statistics.own):
        spread_3 = scores.chosen[layer][own_F].quantile(torch.tensor([0.05, 0.5, 0.95]))
        silent = (statistics.active_count[layer][own_F] == 0).float().mean()
        rows.append([layer, *(f"{value:.3g}" for value in spread_3), f"{silent:.1%}"])
    columns = ["layer", f"{scores.method} 5 %", "median", "95 %", "neurons never active"]
    return Table("score", columns, rows, [f"scored by {scores.description}"])
