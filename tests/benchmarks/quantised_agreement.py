"""Agreement of neuron rankings between a quantised scan and a plain one, layer by layer.

    python tests/benchmarks/quantised_agreement.py REFERENCE QUANTISED [--method s_p] [--normalisation zscore] ...

Both are folders of finished scans of the same model on the same text (outputs/artifacts/<model>/scan/<fingerprint>),
one with model.quantization=none, one with nf4, fp4 or int8.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate
from torch import Tensor

from instruments.errors import ContractError, UserError
from stages.artifacts.carve import NeuronStatistics
from stages.score.config import ScoreConfig
from stages.score.stage import rank_correlation, score_neurons

# Shares of a layer's neurons that a carve may keep.
SHARES = (0.1, 0.25, 0.5)
SUMS = {
    "activation": ("sum_abs",),
    "gradient": ("grad_norm_gate", "grad_norm_up", "grad_norm_down"),
    "frequency": ("active_count",),
}


@dataclass(frozen=True)
class Agreement:
    """One figure per layer each; a correlation is None if a measure is constant."""

    score: list[float | None]  # Spearman of the score
    terms: dict[str, list[float | None]]  # Spearman of the score's terms
    overlap: dict[float, list[float]]  # share of the best neurons → fraction of them in both


def compare_scans(
    reference: NeuronStatistics, quantised: NeuronStatistics, score: ScoreConfig, shares: Sequence[float] = SHARES
) -> Agreement:
    """Score both scans alike and compare the ranks. Raises ContractError: their shapes or token counts differ."""
    sizes = [(tuple(scan.sum_abs.shape), scan.tokens) for scan in (reference, quantised)]
    if sizes[0] != sizes[1]:
        raise ContractError(
            f"the scans have (layers, neurons), tokens of {sizes[0]} and {sizes[1]}", do="scan the same"
        )
    scores = [score_neurons(scan, score, seed=0).chosen for scan in (reference, quantised)]
    terms = {
        name: rank_correlation(_total(reference, fields), _total(quantised, fields)) for name, fields in SUMS.items()
    }
    return Agreement(
        rank_correlation(*scores), terms, {share: top_overlap(scores[0], scores[1], share) for share in shares}
    )


def top_overlap(first_LF: Tensor, second_LF: Tensor, share: float) -> list[float]:
    """Fraction of the best `share` of neurons that is the same in both, by layer; chance gives `share`."""
    count = max(1, round(share * first_LF.shape[1]))
    pairs = zip(first_LF, second_LF, strict=True)
    tops = [[set(scores_F.topk(count).indices.tolist()) for scores_F in pair] for pair in pairs]
    return [len(first & second) / count for first, second in tops]


def _total(scan: NeuronStatistics, fields: Sequence[str]) -> Tensor:
    return sum(getattr(scan, name).double() for name in fields)


def report(agreement: Agreement) -> str:
    """A table with one row per layer, and the mean."""
    correlations = [agreement.score, *agreement.terms.values()]
    columns = [*correlations, *agreement.overlap.values()]
    rows = [[layer, *(_shown(column[layer]) for column in columns)] for layer in range(len(agreement.score))]
    known = [[value for value in column if value is not None] for column in columns]
    rows.append(["mean", *(_shown(sum(column) / len(column) if column else None) for column in known)])
    headers = ["layer", "ρ score", *(f"ρ {name}" for name in agreement.terms)]
    headers += [f"same of top {share:.0%}" for share in agreement.overlap]
    return tabulate(rows, headers, disable_numparse=True)


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def read_words(words: Sequence[str] | None = None) -> Namespace:
    """Parse the command line; settings of the score are those of stages/score/config.py."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reference", type=Path)
    parser.add_argument("quantised", type=Path)
    default = ScoreConfig()
    for name in ("method", "form", "normalisation"):
        parser.add_argument(f"--{name}", default=getattr(default, name))
    for name in ("activation_weight", "gradient_weight", "frequency_weight"):
        parser.add_argument(f"--{name}", type=float, default=getattr(default, name))
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if the scans cannot be read or compared."""
    wanted = vars(read_words(words))
    reference, quantised = wanted.pop("reference"), wanted.pop("quantised")
    try:
        agreement = compare_scans(
            NeuronStatistics.load(reference), NeuronStatistics.load(quantised), ScoreConfig(**wanted)
        )
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{report(agreement)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
