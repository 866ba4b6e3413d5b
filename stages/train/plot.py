"""The gap over the dense model by tokens seen, and the experts' load below it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

FILE = "loss.svg"


def write_plot(lines: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write `folder/loss.svg` from the lines of the record."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    gap, load = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    dense = float(lines[0]["dense_heldout_loss"])
    places, gaps = _over_tokens(lines, "heldout_loss")
    gap.axhline(0, color="grey", linewidth=1)
    gap.plot(places, [value - dense for value in gaps], marker="o", markersize=3)
    gap.set_ylabel("held-out loss over dense, nats")
    load.plot(*_over_tokens(lines, "load_max_over_mean"), label="worst layer")
    load.plot(*_over_tokens(lines, "load_max_over_mean_average"), label="mean of layers")
    load.set_ylabel("load, max over mean")
    load.set_xlabel("tokens seen")
    load.legend()
    figure.savefig(folder / FILE)


def _over_tokens(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Tokens seen and the values of one figure; held-out lines stand beside the count of the line around them."""
    by_step = {line["step"]: int(line["tokens"]) for line in lines if "tokens" in line} | {0: 0}
    said = [line for line in lines if name in line and line["step"] in by_step]
    return [by_step[line["step"]] for line in said], [float(line[name]) for line in said]
