"""Findings of watch_model, their log, and `python -m pipeline watch_log FILE --plot OUT`, which reads the log."""

import argparse
import json
import logging
import math
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from instruments.errors import ConfigError, ContractError, check_output, exit_code, say
from instruments.files import plain_json

logger = logging.getLogger(__name__)

NOTE, WARNING, SEVERE = "note", "warning", "severe"
_LEVELS = {NOTE: logging.INFO, WARNING: logging.WARNING, SEVERE: logging.ERROR}


@dataclass(frozen=True)
class Anomaly:
    """A finding of one step."""

    # not_finite, skipped, vanishing, exploding, dead_layer, near_limit, no_gradient, outputs_unseen, loss_scale,
    # falling_scale, not_zeroed, not_stepped, loss_rises, stalled_weights
    kind: str
    severity: str
    message: str
    where: tuple[str, ...] = ()  # modules, the first or worst one first


@dataclass(frozen=True)
class StepReport:
    """Measurements and findings of one step; missing numbers are None."""

    step: int
    loss: float | None
    gradient_norm: float
    loss_scale: float | None
    layers: Mapping[str, float]  # gradient norm by module, in order of execution
    anomalies: tuple[Anomaly, ...]
    outputs: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # minimum and maximum by module

    def record(self, *, layers: bool) -> dict[str, object]:
        """Values for JSON; layers and outputs only if `layers` or if there are findings."""
        details = layers or self.anomalies
        facts = {
            "step": self.step,
            "gradient_norm": self.gradient_norm,
            "loss": self.loss,
            "loss_scale": self.loss_scale,
            "layers": self.layers if details else None,
            "outputs": self.outputs if self.outputs and details else None,
            "anomalies": [vars(anomaly) for anomaly in self.anomalies],
        }
        return {name: plain_json(fact) for name, fact in facts.items() if fact is not None}

    def scalars(self, *, layers: bool) -> dict[str, float]:
        """The same as single numbers: findings are counted by kind."""
        facts = {"loss": self.loss, "gradient_norm": self.gradient_norm, "loss_scale": self.loss_scale}
        facts |= Counter(f"findings/{anomaly.kind}" for anomaly in self.anomalies)
        norms = {f"gradient_norm/{layer}": norm for layer, norm in self.layers.items() if layers or self.anomalies}
        return {f"watch/{name}": value for name, value in (facts | norms).items() if value is not None}


Sink = Any  # path of a file, SummaryWriter of TensorBoard, or run of Weights & Biases


@dataclass
class WatchConfig:
    """Settings of watch_model."""

    vanishing: float = 1e-6  # a gradient, of a layer or of all together, vanishes below this L2 norm
    # It explodes above this one (both after unscaling), if it is also much larger than usual.
    exploding: float = 100.0
    repeat_steps: int = 100  # steps after which a finding that persists is logged again
    every_steps: int = 1  # outputs are watched at the first step, and at those that this number divides


_BEGINNING = b'{"step": '  # of every line
_LAYER_STEPS = 10  # steps between two lines with the norm of every layer


class StepLog:
    """Writes reports to a file or to a writer of others, and logs each finding once in `repeat_steps` steps."""

    def __init__(self, log: Sink, config: WatchConfig) -> None:
        """Reports are appended to the file at `log`, of other processes than the first to `file_of_rank`.

        None, or after an error of the file: findings are only logged. Raises ConfigError: a log of another kind.
        """
        self.path = Path(log).absolute() if isinstance(log, Path | str) else None
        self.writer: Any = log if self.path is None else None
        self.config = config
        self._said: dict[tuple[str, tuple[str, ...]], int] = {}  # finding → step at which it was last logged
        self._appends = False  # the file ends with a whole line
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        elif not (log is None or hasattr(log, "add_scalar") or hasattr(log, "log")) or isinstance(log, logging.Logger):
            what = f"a log of type {type(log).__name__} is no file, no SummaryWriter of TensorBoard, no run of W&B"
            raise ConfigError(what, where="watch_model", do="log='watch.jsonl'")

    def write(self, report: StepReport) -> None:
        """Write a line, and log each finding that is new or was last logged long ago."""
        for anomaly in report.anomalies:
            key = (anomaly.kind, anomaly.where[:1])
            if key not in self._said or report.step - self._said[key] >= self.config.repeat_steps:
                self._said[key] = report.step
                logger.log(_LEVELS[anomaly.severity], "step %d: %s", report.step, anomaly.message)
        layers = report.step % _LAYER_STEPS == 0
        if hasattr(self.writer, "add_scalar"):
            for name, value in report.scalars(layers=layers).items():
                self.writer.add_scalar(name, value, report.step)
        elif self.writer is not None:  # without step=, which drops numbers of steps before the run's own
            self.writer.log({**report.scalars(layers=layers), "watch/step": report.step})
        if self.path is not None:
            try:
                self._append(file_of_rank(self.path), json.dumps(report.record(layers=layers)) + "\n")
            except OSError as error:  # no reason to end a training
                logger.error("the log ends before step %d: %s", report.step, error)
                self.path = None

    def _append(self, path: Path, line: str) -> None:
        if not self._appends and path.is_file():  # a killed run may have left half a line
            content = path.read_bytes()
            whole = content.rfind(b"\n") + 1
            if _BEGINNING.startswith(content[whole:][: len(_BEGINNING)]):  # not of another file
                os.truncate(path, whole)
        self._appends = True
        with path.open("a", encoding="utf-8") as file:
            file.write(line)


def file_of_rank(path: Path) -> Path:
    """`path` in the first process, else the same name with the rank: watch.jsonl, watch-1.jsonl ..."""
    import torch.distributed as workers  # noqa: PLC0415 - slow to import, and reading a log does without

    rank = workers.get_rank() if workers.is_available() and workers.is_initialized() else 0
    return path.with_stem(f"{path.stem}-{rank}") if rank else path


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    0: done; 1: the file is not a log of steps; 2: wrong command line; 130: interrupted.
    """
    about = "Summarise the log of a watched training run."
    parser = argparse.ArgumentParser(prog="python -m pipeline watch_log", description=about)
    parser.add_argument("file", type=Path, help="log of watch_model, or metrics.jsonl of stage=train")
    parser.add_argument(
        "--plot", type=Path, metavar="OUT", help="draw loss, gradient norm and loss scale, as PNG or SVG"
    )
    wanted = parser.parse_args(words)
    return exit_code(lambda: _run(wanted.file, wanted.plot))


def _run(file: Path, picture: Path | None) -> None:
    check_output(picture)
    try:
        lines = read_step_log(file)
        if not any({"loss", "gradient_norm"} & line.keys() for line in lines):
            raise ValueError("it holds neither losses nor gradient norms")
        summary = describe(lines)
    except (OSError, ValueError, AttributeError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        raise ContractError(f"no log of steps: {error}", where=str(file), do="name a log of watch_model") from error
    say(summary)
    if picture:
        draw_training_steps(lines, picture)
        sys.stdout.write(f"{picture}\n")


def read_step_log(path: Path) -> list[dict[str, Any]]:
    """All complete lines; a last line cut short by a kill is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def describe(lines: Sequence[Mapping[str, Any]]) -> str:
    """Number of steps, and each kind of finding with its count, first step and message."""
    found: dict[str, list[tuple[int, str]]] = {}  # kind → step and message of each finding
    for line in lines:
        named = [(one["kind"], one["message"]) for one in line.get("anomalies", ())]
        for kind, message in named + [("warning", words) for words in line.get("warnings", ())]:
            found.setdefault(kind, []).append((line["step"], message))
    steps = {line["step"] for line in lines}
    text = f"{len(steps):,} steps, {min(steps)} to {max(steps)}; {sum(map(len, found.values())):,} findings\n"
    for kind, places in found.items():
        text += f"{kind} ({len(places):,} times), first at step {places[0][0]}: {places[0][1]}\n"
    if scales := [float(line["loss_scale"]) for line in lines if "loss_scale" in line]:
        rises, falls = (sum(sign * (b - a) > 0 for a, b in pairwise(scales)) for sign in (1, -1))
        text += f"loss scale: {rises} rises, {falls} falls\n"
    return text


_CURVES = (("loss", "loss", False), ("gradient_norm", "gradient norm", True), ("loss_scale", "loss scale", True))
_COLOURS = {"warning": "#d69900", "severe": "#c62828"}


def draw_training_steps(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a PNG or SVG, by the file's ending: one panel per quantity in the log, steps with findings marked.

    `lines`: from `read_step_log`, also of a training run's `metrics.jsonl`.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - it takes a second to load

    present = [curve for curve in _CURVES if any(curve[0] in line for line in lines)]
    figure = Figure(figsize=(9, 1 + 2.2 * len(present)), layout="constrained")
    panels = figure.subplots(len(present), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (name, label, logarithmic) in zip(panels, present, strict=True):
        points = [(line["step"], float(line[name])) for line in lines if name in line]
        finite = [value if math.isfinite(value) else math.nan for _step, value in points]
        steps, dots = [step for step, _value in points], "." if len(points) < 60 else None
        panel.plot(steps, finite, color="#2b6ca3", linewidth=1.2, marker=dots)
        if lost := [step for step, value in points if not math.isfinite(value)]:
            edge = panel.get_xaxis_transform()
            panel.scatter(lost, [0.97] * len(lost), transform=edge, marker="x", color="#c62828", label="not finite")
            panel.legend(fontsize=8)
        if logarithmic and any(value > 0 for value in finite):
            panel.set_yscale("log")
        panel.set_ylabel(label)
        for line in lines:
            severities = {found["severity"] for found in line.get("anomalies", ())}
            severities |= {"warning"} if line.get("warnings") else set()
            for severity in severities & _COLOURS.keys():
                panel.axvline(line["step"], color=_COLOURS[severity], linewidth=0.8, alpha=0.5, zorder=0)
    panels[-1].set_xlabel("step")
    figure.savefig(path)
