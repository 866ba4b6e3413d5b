"""check_loss_scale: what a GradScaler's scale says about a training in float16."""

from collections.abc import Sequence
from typing import Protocol

from models.numerics.watch.anomalies import SEVERE, WARNING, Anomaly
from models.numerics.watch.config import WatchConfig


class Scaler(Protocol):
    """What is asked of a GradScaler."""

    def get_scale(self) -> float:
        """Its scale."""
        ...

    def is_enabled(self) -> bool:
        """Whether it scales at all."""
        ...


def check_loss_scale(
    scale: Scaler | float, history: Sequence[float] = (), config: WatchConfig | None = None
) -> list[Anomaly]:
    """Judge a loss scale.

    Args:
        scale: a GradScaler, or the scale now; a scaler that is switched off has nothing to judge.
        history: scales of the steps before, the oldest first.
        config: thresholds; None takes the defaults.
    Returns:
        Nothing where all is well; below 128 a warning, at 1 severe, five falls in a row a warning.
    """
    config = config or WatchConfig()
    if not isinstance(scale, int | float):
        if not scale.is_enabled():
            return []
        scale = scale.get_scale()
    found = []
    if not scale > config.lost_scale:
        message = f"the loss scale is {scale:g}: overflows go on without any scaling, and float16 gradients underflow"
        found.append(Anomaly("loss_scale", SEVERE, message))
    elif scale < config.low_scale:
        message = f"the loss scale is {scale:g}, below {config.low_scale:g}: small gradients underflow in float16"
        found.append(Anomaly("loss_scale", WARNING, message))
    falls = count_falls([*history, scale])
    if falls >= config.falls:
        message = f"the loss scale fell {falls} steps in a row, to {scale:g}: something overflows whatever the scale"
        found.append(Anomaly("falling_scale", WARNING, message))
    return found


def count_falls(scales: Sequence[float]) -> int:
    """Falls in a row at the end, one step each."""
    falls = 0
    for before, after in zip(reversed(scales[:-1]), reversed(scales[1:]), strict=True):
        if not after < before:
            break
        falls += 1
    return falls
