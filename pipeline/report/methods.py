"""How the models of an evaluation are called and drawn: a hue for what they route by, dashed before alignment."""

from collections.abc import Sequence
from dataclasses import dataclass

from stages.plots.markers import MARKERS


@dataclass(frozen=True)
class Method:
    """Name for a chart, classes for colour and line, shape of the points."""

    name: str
    kind: str
    marker: str


KNOWN = {
    "dense": Method("dense model", "dense", "circle"),
    "carved": Method("this MoE", "moe", "circle"),
    "unaligned": Method("this MoE, not aligned", "moe before", "circle"),
    "static_mask": Method("static mask", "mask before", "square"),
    "static_mask_aligned": Method("static mask, aligned", "mask", "square"),
    "best_mask_aligned": Method("best static mask, aligned", "extra-0", "square"),
    "random_router": Method("random router", "random before", "triangle"),
    "random_router_aligned": Method("random router, aligned", "random", "triangle"),
    "oracle": Method("output oracle", "oracle before", "diamond"),
    "oracle_aligned": Method("output oracle, aligned", "oracle", "diamond"),
}
ALIGNED = "_aligned"
FURTHER = ("extra-0", "extra-1", "extra-2")


def method_of(name: str, names: Sequence[str]) -> Method:
    """The looks of a model; one that is not known here takes a hue of its own among `names`."""
    if name in KNOWN:
        return KNOWN[name]
    base = name.removesuffix(ALIGNED)
    unknown = list(dict.fromkeys(other.removesuffix(ALIGNED) for other in names if other not in KNOWN))
    place = unknown.index(base) if base in unknown else 0
    words = base.replace("_", " ")
    before = f"{base}{ALIGNED}" in names and name == base
    return Method(
        f"{words}, aligned" if name != base else words,
        f"{FURTHER[place % len(FURTHER)]}{' before' if before else ''}",
        MARKERS[-1 - place % 2],
    )
