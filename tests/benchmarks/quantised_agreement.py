"""Agreement of neuron rankings between a quantised scan and a plain one, layer by layer.

    PYTHONPATH=. python tests/benchmarks/quantised_agreement.py REFERENCE QUANTISED

Both are folders of finished scans of the same model on the same text (outputs/artifacts/<model>/scan/<fingerprint>),
one with model.quantization=none, one with nf4, fp4 or int8. Neurons are ranked by the default S_p.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from scipy.stats import spearmanr
from tabulate import tabulate
from torch import Tensor

from instruments.errors import ContractError, UserError
from stages.artifacts.carve import NeuronStatistics
from stages.score.config import ScoreConfig
from stages.score.stage import score_neurons

SHARES = (0.1, 0.25, 0.5)  # of a layer's neurons, which a carve may keep


def compare_scans(reference: NeuronStatistics, quantised: NeuronStatistics) -> list[list[float | None]]:
    """Spearman of the score, which is None if one is constant, and `top_overlap` of each share; a row for each layer.

    Raises ContractError: the scans differ in their shapes or token counts.
    """
    sizes = [(tuple(scan.sum_abs.shape), scan.tokens) for scan in (reference, quantised)]
    if sizes[0] != sizes[1]:
        what = f"the scans have (layers, neurons), tokens of {sizes[0]} and {sizes[1]}"
        raise ContractError(what, do="scan the same text with the same model")
    scores = [score_neurons(scan, ScoreConfig(), seed=0).chosen for scan in (reference, quantised)]
    columns = [rank_correlation(*scores), *(top_overlap(*scores, share) for share in SHARES)]
    return [list(row) for row in zip(*columns, strict=True)]


def rank_correlation(first_LF: Tensor, second_LF: Tensor) -> list[float | None]:
    """Spearman's correlation by layer; None if one of the two is constant."""
    return [
        None
        if min(len(first_F.unique()), len(second_F.unique())) == 1
        else float(spearmanr(first_F, second_F).statistic)
        for first_F, second_F in zip(first_LF, second_LF, strict=True)
    ]


def top_overlap(first_LF: Tensor, second_LF: Tensor, share: float) -> list[float]:
    """Fraction of the best `share` of neurons that is the same in both, by layer; chance gives `share`."""
    count = max(1, round(share * first_LF.shape[1]))
    pairs = zip(first_LF, second_LF, strict=True)
    tops = [[set(scores_F.topk(count).indices.tolist()) for scores_F in pair] for pair in pairs]
    return [len(first & second) / count for first, second in tops]


def main(words: Sequence[str] | None = None) -> int:
    """Print a row for each layer and the means; returns 0, or 1 if the scans cannot be read or compared."""
    reference, quantised = sys.argv[1:] if words is None else words
    try:
        rows = compare_scans(NeuronStatistics.load(Path(reference)), NeuronStatistics.load(Path(quantised)))
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    known = [[value for value in column if value is not None] for column in zip(*rows, strict=True)]
    means = [sum(column) / len(column) if column else None for column in known]
    headers = ["layer", "ρ score", *(f"same of top {share:.0%}" for share in SHARES)]
    table = [[layer, *row] for layer, row in [*enumerate(rows), ("mean", means)]]
    sys.stdout.write(f"{tabulate(table, headers, floatfmt='.4f', missingval='–')}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
