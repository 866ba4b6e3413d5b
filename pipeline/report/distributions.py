"""How the score is spread in every layer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from stages.artifacts.tensor_file import unpack_tag
from stages.plots.ridges import Ridge

BINS = 60
SHOWN = (0.002, 0.998)  # quantiles of all neurons between which the axis runs; what lies outside is in the end bins


def read_scores(folder: Path) -> tuple[str, NDArray[np.float32]] | None:
    """What neurons were ranked by, and its (L, F) values; None where the file is gone or unreadable."""
    try:
        with safe_open(folder / "scores.safetensors", framework="numpy") as file:
            tag = unpack_tag(file.metadata())
            scores: NDArray[np.float32] = file.get_tensor("chosen")
    except (OSError, SafetensorError):
        return None
    return str(tag["plain"]["description"]), scores


def describe_distributions(scores_LF: NDArray[np.float32]) -> tuple[Sequence[Ridge], tuple[float, float]]:
    """A ridge for each layer, and the ends of the axis they share."""
    low, high = (float(value) for value in np.quantile(scores_LF, SHOWN))
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    return [_ridge(row_F, low, high) for row_F in scores_LF], (low, high)


def _ridge(row_F: NDArray[np.float32], low: float, high: float) -> Ridge:
    counts, _edges = np.histogram(np.clip(row_F, low, high), bins=BINS, range=(low, high))
    first, median, third = _as_floats(np.quantile(row_F, (0.25, 0.5, 0.75)))
    return Ridge(_as_floats(counts / len(row_F)), (first, median, third))


def _as_floats(values: NDArray[Any]) -> list[float]:
    floats: list[float] = values.tolist()
    return floats
