"""What came of the carve, in a sentence and four figures."""

from pipeline.report.evaluations import Evaluation
from pipeline.report.groups import TINY
from pipeline.report.numbers import nats, percent

RIVALS = {
    "static_mask": "a static mask of the same width",
    "static_mask_aligned": "the aligned static mask",
    "best_mask_aligned": "the best static mask, aligned",
    "random_router": "a random router",
}


def verdict(evaluation: Evaluation) -> str:
    """The gap, and against what it stands."""
    gap = evaluation.gap("carved") or 0.0
    change = f"costs {nats(gap)} nats per token" if gap > 0 else f"costs nothing measurable ({nats(gap)} nats)"
    opening = f"Serving each token with {percent(evaluation.share)} of the FFN's neurons {change}"
    compared = [words for name, words in _comparisons(evaluation, gap) if words]
    oracle = evaluation.gap("oracle_aligned")
    ending = (
        "" if oracle is None else f" Choosing experts by their outputs, which no router can, would cost {nats(oracle)}."
    )
    return f"{opening}{': ' if compared else ''}{_listed(compared)}.{ending}"


def _comparisons(evaluation: Evaluation, gap: float) -> list[tuple[str, str]]:
    found = []
    for name, rival in RIVALS.items():
        other = evaluation.gap(name)
        if other is None:
            continue
        if gap >= other:
            found.append((name, f"{rival} does no worse ({nats(other)})"))
        elif gap > TINY:
            found.append((name, f"{percent(gap / other)} of what {rival} costs"))
        else:
            found.append((name, f"{rival} costs {nats(other)}"))
    return found


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def key_figures(evaluation: Evaluation) -> list[tuple[str, str]]:
    """Figure and what it is, for the head of the page."""
    gap, mask = evaluation.gap("carved") or 0.0, evaluation.gap("static_mask")
    models, shape = evaluation.models, evaluation.shape
    figures = [
        (nats(gap), "nats of loss per token above the dense model"),
        (f"{models['carved']['perplexity']:,.4g}", f"perplexity; dense {models['dense']['perplexity']:,.4g}"),
        (percent(evaluation.share), f"of {evaluation.width:,} FFN neurons active per token: {shape.always_on:,} always "
         f"on, {shape.top_k} of {shape.experts} experts of {shape.n}"),
    ]  # fmt: skip
    if mask is not None and mask > TINY:
        figures.append((percent(gap / mask), "of the static mask's gap"))
    return figures
