"""Numbers, names and sentences of the report."""

from collections.abc import Sequence
from dataclasses import dataclass

from models.config import MoEShape
from pipeline.report.evaluations import TINY, Evaluation

RIVALS = {
    "static_mask": "a static mask of the same width",
    "static_mask_aligned": "the aligned static mask",
    "best_mask_aligned": "the best static mask, aligned",
    "random_router": "a random router",
    "cmoe": "CMoE",
}


@dataclass(frozen=True)
class Method:
    """Name and drawing style of a model in an evaluation."""

    name: str
    ink: str  # a colour name of charts.py
    marker: str  # matplotlib's letter
    before: bool = False  # before alignment: dashed lines, pale bars


KNOWN = {
    "dense": Method("dense model", "ink", "o"),
    "carved": Method("this MoE", "moe", "o"),
    "unaligned": Method("this MoE, not aligned", "moe", "o", before=True),
    "static_mask": Method("static mask", "mask", "s", before=True),
    "static_mask_aligned": Method("static mask, aligned", "mask", "s"),
    "best_mask_aligned": Method("best static mask, aligned", "extra-0", "s"),
    "random_router": Method("random router", "random", "^", before=True),
    "random_router_aligned": Method("random router, aligned", "random", "^"),
    "cmoe": Method("CMoE", "extra-1", "p", before=True),
    "cmoe_aligned": Method("CMoE, aligned", "extra-1", "p"),
    "moefication": Method("MoEfication", "extra-2", "v", before=True),
    "moefication_aligned": Method("MoEfication, aligned", "extra-2", "v"),
    "oracle": Method("output oracle", "oracle", "D", before=True),
    "oracle_aligned": Method("output oracle, aligned", "oracle", "D"),
}
ALIGNED = "_aligned"


def method_of(name: str, names: Sequence[str]) -> Method:
    """The style of a model; unknown models among `names` get three colours in turn."""
    if name in KNOWN:
        return KNOWN[name]
    base = name.removesuffix(ALIGNED)
    unknown = list(dict.fromkeys(other.removesuffix(ALIGNED) for other in names if other not in KNOWN))
    place = unknown.index(base) if base in unknown else 0
    words = base.replace("_", " ") + (", aligned" if name != base else "")
    return Method(words, f"extra-{place % 3}", "p^"[place % 2], name == base and f"{base}{ALIGNED}" in names)


def nats(value: float) -> str:
    """A difference of losses: four decimals, with sign."""
    return f"{value:+.4f}".replace("-", "−")


def percent(share: float) -> str:
    """Percent with no decimals, below ten with one; the space does not break."""
    value = 100 * share
    return f"{value:.{0 if abs(value) >= 9.95 or not value else 1}f}\N{NO-BREAK SPACE}%".replace("-", "−")


def duration(seconds: float | None) -> str:
    """Seconds, minutes or hours."""
    if seconds is None:
        return "–"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"


def size(count: int | None) -> str:
    """Bytes in MiB or GiB."""
    if count is None:
        return "–"
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def plain(value: object) -> str:
    """A cell of a table: integers with separators, floats with four digits."""
    if isinstance(value, float):
        return f"{value:.4g}".replace("-", "−")
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}".replace("-", "−")
    return "–" if value is None else str(value)


def shape_words(shape: MoEShape) -> str:
    """The carved shape as text."""
    always = f" and {plain(shape.always_on)} always-on neurons" if shape.always_on else ""
    pooled = " in one pool for all layers" if shape.pooled else ""
    kept = f"; layers {', '.join(map(str, shape.dense_layers))} stay dense" if shape.dense_layers else ""
    return f"{shape.experts} experts of {shape.n}{pooled}, {shape.top_k} per token{always}{kept}"


def verdict(evaluation: Evaluation) -> str:
    """The gap, compared with the baselines' and the oracle's."""
    gap = evaluation.gap("carved") or 0.0
    change = f"costs {nats(gap)} nats per token" if gap > 0 else f"costs nothing measurable ({nats(gap)} nats)"
    found = {rival: evaluation.gap(name) for name, rival in RIVALS.items()}
    compared = [_compare(gap, other, rival) for rival, other in found.items() if other is not None]
    listed = " and ".join([", ".join(compared[:-1]), compared[-1]] if len(compared) > 1 else compared)
    words = f"Serving each token with {percent(evaluation.share)} of the FFN's neurons {change}"
    words += f": {listed}." if listed else "."
    if (oracle := evaluation.gap("oracle_aligned")) is not None:
        words += f" Choosing experts by their outputs, which no router can, would cost {nats(oracle)}."
    return words


def _compare(gap: float, other: float, rival: str) -> str:
    if gap >= other:
        return f"{rival} does no worse ({nats(other)})"
    return f"{percent(gap / other)} of what {rival} costs" if gap > TINY else f"{rival} costs {nats(other)}"


def key_figures(evaluation: Evaluation) -> list[tuple[str, str]]:
    """Figures and their explanations for the head of the page."""
    gap, mask = evaluation.gap("carved") or 0.0, evaluation.gap("static_mask")
    models, shape = evaluation.models, evaluation.shape
    averaged = ", averaged over all layers" if shape.dense_layers else ""
    figures = [
        (nats(gap), "nats of loss per token above the dense model"),
        (f"{models['carved']['perplexity']:,.4g}", f"perplexity; dense {models['dense']['perplexity']:,.4g}"),
        (percent(evaluation.share), f"of {evaluation.width:,} FFN neurons active per token{averaged}: "
         f"{shape.always_on:,} always on, {shape.top_k} of {shape.experts} experts of {shape.n}"),
    ]  # fmt: skip
    if mask is not None and mask > TINY:
        figures.append((percent(gap / mask), "of the static mask's gap"))
    return figures
