"""From the numbers of a step to what is wrong with it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from models.numerics.watch.anomalies import NOTE, SEVERE, WARNING, Anomaly, shown
from models.numerics.watch.config import WatchConfig


@dataclass(frozen=True)
class Output:
    """Of a module: the largest absolute value, in which format."""

    module: str
    dtype: torch.dtype
    value: float


@dataclass(frozen=True)
class Numbers:
    """Of one step, on the host."""

    loss: float | None
    layers: Mapping[str, float]  # gradient norms in the order modules run
    not_finite: Sequence[str]  # layers whose gradient holds NaN or inf, in that order
    outputs: Sequence[Output]  # in the order they were computed
    scaled: bool  # a GradScaler skips steps that are not finite


def judge(numbers: Numbers, config: WatchConfig) -> list[Anomaly]:
    """Everything that is wrong; gradients that are not finite have no norms to judge."""
    lost = judge_finiteness(numbers)
    norms = [] if numbers.not_finite else judge_norms(numbers.layers, config)
    return [*lost, *norms, *judge_range(numbers.outputs, config)]


def judge_finiteness(numbers: Numbers) -> list[Anomaly]:
    """NaN and inf, with the place where they come from."""
    outputs = numbers.outputs
    bad = next((place for place, output in enumerate(outputs) if not math.isfinite(output.value)), None)
    backwards = list(reversed(numbers.not_finite))
    if bad is not None:
        first, before = outputs[bad], outputs[bad - 1].module if bad else "the model's input"
        what = f"{_word(first.value)} first in the output of {first.module} ({_name(first.dtype)})"
        return [Anomaly("not_finite", SEVERE, f"{what}; finite until {before}", (first.module, *backwards))]
    if numbers.loss is not None and not math.isfinite(numbers.loss):
        message = f"the loss is {numbers.loss:g}{_finite_outputs(outputs)}: compute it in float32, inside autocast"
        if backwards:
            message += f"; backwards, the first layer whose gradient is not finite is {backwards[0]}"
        return [Anomaly("not_finite", SEVERE, message, tuple(backwards))]
    if not backwards:
        return []
    what = f"backwards, the first gradient that is not finite is that of {backwards[0]}, of {len(backwards)} layers"
    if numbers.scaled:
        return [Anomaly("skipped", NOTE, f"{what}; the step is skipped and the loss scale falls", tuple(backwards))]
    return [Anomaly("not_finite", SEVERE, f"{what}{_finite_outputs(outputs)}", tuple(backwards))]


def judge_norms(layers: Mapping[str, float], config: WatchConfig) -> list[Anomaly]:
    """Gradients that vanish or explode, and layers that get none while the others do."""
    if not layers:
        return []
    total, typical = math.hypot(*layers.values()), median(layers.values())
    found = []
    dead = [name for name, norm in layers.items() if norm <= config.dead * typical] if 0 < typical < math.inf else []
    low = [name for name, norm in layers.items() if norm < config.vanishing and name not in dead]
    high = sorted((name for name in layers if layers[name] > config.exploding), key=lambda name: -layers[name])
    if dead:
        what = f"no gradient to speak of in {shown(dead)}: at most {config.dead:g} of the median layer's {typical:.2g}"
        found.append(Anomaly("dead_layer", WARNING, what, tuple(dead)))
    if total < config.vanishing:
        what = f"the gradient vanishes: its norm is {total:.2g}, below {config.vanishing:g}"
        found.append(Anomaly("vanishing", SEVERE, what))
    elif low:
        what = f"gradient norms below {config.vanishing:g}: {_with_norms(low, layers)}"
        found.append(Anomaly("vanishing", WARNING, what, tuple(low)))
    if total > config.exploding:
        what = f"the gradient explodes: its norm is {total:.3g}, above {config.exploding:g}"
        worst = max(layers, key=lambda name: layers[name])
        what += f"; largest: {_with_norms(high or [worst], layers)}"
        found.append(Anomaly("exploding", WARNING, what, tuple(high or [worst])))
    return found


def judge_range(outputs: Sequence[Output], config: WatchConfig) -> list[Anomaly]:
    """Outputs next to the largest number of their format."""
    shares: dict[str, float] = {}
    for output in outputs:
        share = output.value / torch.finfo(output.dtype).max
        if math.isfinite(share) and share > max(config.near_limit, shares.get(output.module, 0)):
            shares[output.module] = share
    worst = sorted(shares, key=lambda name: -shares[name])
    if not worst:
        return []
    what = f"outputs up to {shares[worst[0]]:.0%} of the largest number of their format: {shown(worst)}"
    return [Anomaly("near_limit", WARNING, what, tuple(worst))]


def _finite_outputs(outputs: Sequence[Output]) -> str:
    if not outputs:
        return ""
    largest = max(outputs, key=lambda output: output.value)
    where = f"{largest.value:.3g} in {largest.module}, {_name(largest.dtype)}"
    return (
        f", while all outputs of the model are finite (largest {where}; last {outputs[-1].module}, "
        f"{_name(outputs[-1].dtype)})"
    )


def _with_norms(names: Sequence[str], layers: Mapping[str, float]) -> str:
    return shown([f"{name} ({layers[name]:.2g})" for name in names])


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "inf"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
