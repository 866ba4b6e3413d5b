"""Findings from the measurements of this step and earlier ones; RULES.md has an example of each."""

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from statistics import median

import torch
from torch.amp.grad_scaler import GradScaler

from instruments.dtypes import dtype_name
from instruments.errors import some
from instruments.training_watch.step_log import NOTE, SEVERE, WARNING, Anomaly, WatchConfig


@dataclass(frozen=True)
class Output:
    """Minimum and maximum of a module's output, and its format; NaN if the output has NaN."""

    module: str
    dtype: torch.dtype
    low: float
    high: float

    @property
    def value(self) -> float:
        """The largest absolute value."""
        return math.nan if math.isnan(self.low) else max(-self.low, self.high)


def judge_finiteness(
    loss: float | None, lost: Sequence[str], outputs: Sequence[Output], *, scaled: bool
) -> list[Anomaly]:
    """Find NaN and inf, and where they start.

    `lost`: layers with NaN or inf in their gradient; `lost` and `outputs` in order of execution; `scaled`: a
    GradScaler skips such steps.
    """
    bad = next((place for place, output in enumerate(outputs) if not math.isfinite(output.value)), None)
    backwards = list(reversed(lost))
    if bad is not None:
        first, word = outputs[bad], "NaN" if math.isnan(outputs[bad].value) else "inf"
        before = f"finite until {outputs[bad - 1].module}" if bad else "it ran first: look at the model's input, too"
        what = f"{word} first in the output of {first.module} ({dtype_name(first.dtype)}); {before}"
        return [Anomaly("not_finite", SEVERE, what, (first.module, *backwards))]
    if loss is not None and not math.isfinite(loss):
        what = f"the loss is {loss:g}{_finite_outputs(outputs)}: compute it in float32, inside autocast"
        if backwards:
            what += f"; backwards, the first layer whose gradient is not finite is {backwards[0]}"
        return [Anomaly("not_finite", SEVERE, what, tuple(backwards))]
    if not backwards:
        return []
    what = f"backwards, the first gradient that is not finite is that of {backwards[0]}, of {len(backwards)} layers"
    if scaled:
        return [Anomaly("skipped", NOTE, f"{what}; the step is skipped and the loss scale falls", tuple(backwards))]
    return [Anomaly("not_finite", SEVERE, f"{what}{_finite_outputs(outputs)}", tuple(backwards))]


# Steps whose gradient norms are stored, steps for the usual norm (latest: four times as many), and the least number.
_WINDOW, _USUAL, _LEAST = 100, 5, 3


# A layer is dead if its norm is at most this share of the median layer's, for so many steps without rising.
_DEAD, _DEAD_STEPS = 1e-6, 3
_GROWTH = 10  # a gradient that explodes is above this multiple of its usual norm
_HALF = 0.5
_NEAR_LIMIT = 0.5  # share of the largest number of a format above which outputs are too close to it


_START, _ABOVE = 5, 20  # steps whose largest loss is the start, and steps in a row above 1.1 times it that are reported
_STALLED = 20  # steps whose median share of unchanged 16-bit weights is judged


@dataclass
class History:
    """Values of earlier steps that the judgement of a step needs."""

    totals: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))  # gradient norms
    low: dict[str, tuple[int, float]] = field(default_factory=dict)  # layer → low steps in a row, norm in the first

    named: set[str] = field(default_factory=set)  # dead layers that are reported
    losses: list[float] = field(default_factory=list)  # of the first steps
    above: int = 0  # steps in a row with a loss above them; reported once
    still: deque[float] = field(default_factory=lambda: deque(maxlen=_STALLED))  # shares of weights a step left alone
    stalled: bool = False  # reported

    def usual(self) -> float:
        """Usual norm: the lower of the medians of the first and of the latest steps, so that a slow rise counts."""
        seen = [*self.totals]
        return min(median(seen[:_USUAL]), median(seen[-4 * _USUAL :])) if len(seen) >= _LEAST else math.inf


def judge_norms(
    layers: Mapping[str, float], config: WatchConfig, history: History, idle: Collection[str] = ()
) -> list[Anomaly]:
    """Find gradients that vanish or explode, and layers with almost no gradient; adds the norms to the history.

    A layer is judged after several low steps in a row: before a projection that starts at zero (LoRA, residual
    branches) the first gradient is zero and then rises. A large norm alone is no fault: the loss may be a sum.
    `idle`: layers that did not run, such as experts without a token.
    """
    if not layers:
        return []
    total, typical = math.hypot(*layers.values()), median(layers.values())
    dead = {name for name, norm in layers.items() if 0 < typical < math.inf and norm <= _DEAD * typical}
    low = dead | {name for name, norm in layers.items() if norm < config.vanishing}
    whole = {"": total} if total < config.vanishing else {}  # a start at zero grows from step to step
    lasting = _lasting({**layers, **whole}, low.difference(idle) | whole.keys(), history)
    vanished, found = "" in lasting, []
    lasting = [name for name in lasting if name]
    history.named &= dead
    if names := [name for name in lasting if name in dead - history.named]:
        history.named.update(names)
        what = f"no gradient to speak of in {some(names, 3, ', ')}: at most {_DEAD:g} of the median layer's "
        what += f"{typical:.2g}, {_DEAD_STEPS} steps in a row"
        found.append(Anomaly("dead_layer", WARNING, what, tuple(names)))
    if vanished:
        what = f"the gradient vanishes: its norm is {total:.2g}, below {config.vanishing:g}"
        found.append(Anomaly("vanishing", SEVERE, what))
    elif not whole and (names := [name for name in lasting if name not in dead]):
        what = f"gradient norms below {config.vanishing:g}: {_with_norms(names, layers)}"
        # Vanished on the way back to the first layer, or only in a side branch, such as a new model's queries and keys.
        severity = WARNING if names[0] == next(iter(layers)) else NOTE
        found.append(Anomaly("vanishing", severity, what, tuple(names)))
    usual = history.usual()
    if total > config.exploding and (total > _GROWTH * usual or total == math.inf):
        high = sorted((name for name in layers if layers[name] > config.exploding), key=lambda name: -layers[name])
        high = high or [max(layers, key=lambda name: layers[name])]
        before = f" and {total / usual:.3g} times the usual {usual:.3g}" if usual < math.inf else ""
        what = f"the gradient explodes: its norm is {total:.3g}, above {config.exploding:g}{before}"
        found.append(Anomaly("exploding", WARNING, f"{what}; largest: {_with_norms(high, layers)}", tuple(high)))
    history.totals.append(total)
    return found


def _lasting(layers: Mapping[str, float], low: Collection[str], history: History) -> list[str]:
    """Layers whose norm has been low for `_DEAD_STEPS` steps without rising."""
    runs = {}
    for name in low:
        count, first = history.low.get(name, (0, layers[name]))
        runs[name] = (1, layers[name]) if layers[name] > 2 * first else (count + 1, first)
    history.low = runs
    return [name for name in layers if name in runs and runs[name][0] >= _DEAD_STEPS]


def judge_loss(loss: float | None, history: History) -> list[Anomaly]:
    """Find a loss that stays above its start; reported once, and not for losses that may be negative."""
    if loss is None or not math.isfinite(loss):
        return []
    if len(history.losses) < _START:
        history.losses.append(loss)
        return []
    start = max(history.losses)
    history.above = history.above + 1 if min(history.losses) > 0 and loss > 1.1 * start else 0
    if history.above != _ABOVE:
        return []
    what = f"the loss has been above its start for {_ABOVE} steps: {loss:.3g}, at first at most {start:.3g}; a lower "
    return [Anomaly("loss_rises", WARNING, f"{what}learning rate? (no fault where losses work against each other)")]


def judge_stalled(still: float, dtype: torch.dtype, history: History) -> list[Anomaly]:
    """Find 16-bit weights that most steps do not change; reported once.

    `still`: share of the weights with a gradient that the last step did not change.
    """
    history.still.append(still)
    share = median(history.still)
    if history.stalled or len(history.still) < _STALLED or share <= _HALF:
        return []
    history.stalled = True
    what = f"{share:.0%} of the {dtype_name(dtype)} weights do not move: their steps are below half a unit "
    what += (
        "in the last place and are rounded away; keep the weights in float32 and use autocast, or an optimizer that "
    )
    return [Anomaly("stalled_weights", WARNING, f"{what}rounds stochastically or has float32 master weights")]


def judge_range(outputs: Sequence[Output]) -> list[Anomaly]:
    """Find outputs close to the largest number of their format."""
    shares: dict[str, float] = {}
    for output in outputs:
        share = output.value / torch.finfo(output.dtype).max
        if math.isfinite(share) and share > max(_NEAR_LIMIT, shares.get(output.module, 0)):
            shares[output.module] = share
    worst = sorted(shares, key=lambda name: -shares[name])
    if not worst:
        return []
    what = f"outputs up to {shares[worst[0]]:.0%} of the largest number of their format: {some(worst, 3, ', ')}"
    return [Anomaly("near_limit", WARNING, what, tuple(worst))]


def _finite_outputs(outputs: Sequence[Output]) -> str:
    if not outputs:
        return ""
    largest, last = max(outputs, key=lambda output: output.value), outputs[-1]
    ends = f"largest {largest.value:.3g} in {largest.module}, {dtype_name(largest.dtype)}; "
    ends += f"last {last.module}, {dtype_name(last.dtype)}"
    return f", while all outputs of the model are finite ({ends})"


def _with_norms(names: Sequence[str], layers: Mapping[str, float]) -> str:
    return some([f"{name} ({layers[name]:.2g})" for name in names], 3, ", ")


# A loss scale below which gradients underflow easily, and consecutive falls of it that are reported.
LOW_SCALE, FALLS = 128.0, 5


def check_loss_scale(scale: GradScaler | float, history: Sequence[float] = ()) -> list[Anomaly]:
    """Judge a loss scale or a GradScaler's; a disabled GradScaler has no findings.

    `history`: the scales of earlier steps, oldest first.
    Returns:
        A warning below 128, severe at 1 or below, a warning after five falls in a row; else empty.
    """
    if not isinstance(scale, int | float):
        if not scale.is_enabled():
            return []
        scale = scale.get_scale()
    found = []
    if not scale > 1:
        what = f"the loss scale is {scale:g}: overflows go on without any scaling, and float16 gradients underflow"
        found.append(Anomaly("loss_scale", SEVERE, what))
    elif scale < LOW_SCALE:
        what = f"the loss scale is {scale:g}, below {LOW_SCALE:g}: small gradients underflow in float16"
        found.append(Anomaly("loss_scale", WARNING, what))
    latest_first = pairwise([scale, *reversed(history)])
    falls = sum(1 for _ in takewhile(lambda pair: pair[0] < pair[1], latest_first))
    if falls >= FALLS:
        what = f"the loss scale fell {falls} steps in a row, to {scale:g}: something overflows at every scale"
        found.append(Anomaly("falling_scale", WARNING, what))
    return found
