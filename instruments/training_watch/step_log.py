"""What the monitor finds, the log it writes, and `python -m pipeline.watch_log FILE --plot OUT`, which reads it."""

import argparse
import json
import logging
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instruments.errors import ContractError, check_output, exit_code, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOTE, WARNING, SEVERE = "note", "warning", "severe"


@dataclass(frozen=True)
class Anomaly:
    """One finding of one step."""

    kind: str  # not_finite, skipped, vanishing, exploding, dead_layer, near_limit, loss_scale, falling_scale
    severity: str
    message: str
    where: tuple[str, ...] = ()  # modules, the first or worst one first

    def record(self) -> dict[str, object]:
        """For JSON."""
        return {**vars(self), "where": list(self.where)}


@dataclass(frozen=True)
class StepReport:
    """What was measured in one step; a number that was not there is None."""

    step: int
    loss: float | None
    gradient_norm: float
    loss_scale: float | None
    layers: dict[str, float]  # gradient norm by module, in the order they run
    largest_output: tuple[str, float] | None  # module, value
    anomalies: tuple[Anomaly, ...]

    def record(self, *, layers: bool) -> dict[str, object]:
        """For JSON, which knows neither NaN nor inf: they are written as text that float() reads."""
        facts: dict[str, object] = {"step": self.step, "gradient_norm": as_json(self.gradient_norm)}
        facts |= {"loss": as_json(self.loss)} if self.loss is not None else {}
        facts |= {"loss_scale": as_json(self.loss_scale)} if self.loss_scale is not None else {}
        if self.largest_output is not None:
            name, value = self.largest_output
            facts["largest_output"] = {"module": name, "value": as_json(value)}
        if layers or self.anomalies:
            facts["layers"] = {name: as_json(norm) for name, norm in self.layers.items()}
        return facts | {"anomalies": [anomaly.record() for anomaly in self.anomalies]}


def as_json(value: float) -> float | str:
    """A number, or the text of one that JSON cannot hold."""
    return value if math.isfinite(value) else str(value)


@dataclass
class WatchConfig:
    """Thresholds of the monitor, and how much it says."""

    # L2 norm below which a layer's gradient, or that of all layers together, vanishes ...
    vanishing: float = field(default=1e-6, metadata={"minimum": 0})
    # ... and above which it explodes; before clipping, after unscaling.
    exploding: float = field(default=100.0, metadata={"above": 0})
    # A layer is dead whose gradient norm is no more than this share of the median layer's.
    dead: float = field(default=1e-6, metadata={"minimum": 0, "maximum": 1})
    # Look at the outputs of modules: where the first NaN or inf is, how close values are to the end of their format.
    activations: bool = True
    # Share of the largest number of an output's format (float16: 65504) above which its values are too close to it.
    near_limit: float = field(default=0.5, metadata={"above": 0, "maximum": 1})
    # Loss scale below which gradients underflow easily, and at which scaling no longer does anything.
    low_scale: float = field(default=128.0, metadata={"above": 0})
    lost_scale: float = field(default=1.0, metadata={"above": 0})
    # So many falls of the loss scale in a row are no search for its place any more.
    falls: int = field(default=5, metadata={"minimum": 1})
    # Steps after which a finding that lasts is said again.
    repeat_steps: int = field(default=100, metadata={"minimum": 1})
    # Steps between two lines of the log that hold the norm of every layer.
    layer_steps: int = field(default=10, metadata={"minimum": 1})


logger = logging.getLogger(__name__)


class StepLog:
    """The file, and what has been said before."""

    def __init__(self, path: Path | None, config: WatchConfig) -> None:
        """`path` is gone on with where it is there already; None: words alone."""
        self.path, self.config = path, config
        self._said: dict[tuple[str, tuple[str, ...]], int] = {}  # finding → the step it was last said at
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, report: StepReport) -> None:
        """A line, and a warning for each finding that is new or was last said long ago."""
        for anomaly in report.anomalies:
            key = (anomaly.kind, anomaly.where[:1])
            last = self._said.get(key)
            if last is None or report.step - last >= self.config.repeat_steps:
                self._said[key] = report.step
                levels = {NOTE: logging.INFO, SEVERE: logging.ERROR}
                logger.log(levels.get(anomaly.severity, logging.WARNING), "step %d: %s", report.step, anomaly.message)
        if self.path is not None:
            layers = report.step % self.config.layer_steps == 0
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(report.record(layers=layers)) + "\n")


def read_step_log(path: Path) -> list[dict[str, object]]:
    """All whole lines; a last one that a kill cut short is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def main(words: Sequence[str] | None = None) -> int:
    """Do what the command line says; returns the exit code.

    0 done, 1 the file is no such log, 2 the command line is wrong, 130 interrupted.
    """
    about = "What a monitored training did, step by step."
    parser = argparse.ArgumentParser(prog="python -m pipeline.watch_log", description=about)
    parser.add_argument("file", type=Path, help="log of watch_model, or metrics.jsonl of stage=train")
    parser.add_argument(
        "--plot", type=Path, metavar="OUT", help="draw loss, gradient norm and loss scale, as PNG or SVG"
    )
    wanted = parser.parse_args(words)
    return exit_code(lambda: _run(wanted))


def _run(wanted: argparse.Namespace) -> None:
    if wanted.plot:
        check_output(wanted.plot)
    lines = read_lines(wanted.file)
    say(describe(lines))
    if wanted.plot:
        draw_training_steps(lines, wanted.plot)
        sys.stdout.write(f"{wanted.plot}\n")
    sys.stdout.flush()


def read_lines(path: Path) -> list[Mapping[str, Any]]:
    """All lines of the log. Raises ContractError."""
    if path.exists() and not path.is_file():
        raise ContractError("is no regular file", where=str(path), do="name a log of watch_model")
    try:
        lines: list[Mapping[str, Any]] = [*read_step_log(path)]
        for number, line in enumerate(lines, 1):
            _check_line(number, line)
    except (OSError, ValueError, RecursionError) as error:
        raise ContractError(f"cannot be read: {error}", where=str(path), do="name a log of watch_model") from error
    if not any(isinstance(line, dict) and {"loss", "gradient_norm"} & line.keys() for line in lines):
        raise ContractError("holds neither losses nor gradient norms", where=str(path), do="name a log of watch_model")
    if stepless := sum("step" not in line for line in lines):
        raise ContractError(f"{stepless} lines say no step", where=str(path), do="name a log of watch_model")
    return lines


def _check_line(number: int, line: object) -> None:
    """Raise ValueError where a line is no step of a log."""
    if not isinstance(line, dict):
        raise ValueError(f"line {number} is no object")
    if "step" in line and (type(line["step"]) is not int or abs(line["step"]) >= 1 << 62):
        raise ValueError(f"line {number}: step {line['step']!r:.40} is no number of a step")
    for name in {"loss", "gradient_norm", "loss_scale"} & line.keys():
        try:
            float(line[name])
        except (TypeError, OverflowError) as error:
            raise ValueError(f"line {number}: {name} {line[name]!r:.40} is no number") from error
    found = [line.get("anomalies", []), line.get("warnings", [])]
    if not all(isinstance(part, list) for part in found) or not all(isinstance(words, str) for words in found[1]):
        raise ValueError(f"line {number}: anomalies or warnings are no lists")
    for one in found[0]:
        if not isinstance(one, dict) or not all(isinstance(one.get(n), str) for n in ("kind", "severity", "message")):
            raise ValueError(f"line {number}: an anomaly without kind, severity and message")


def describe(lines: Sequence[Mapping[str, Any]]) -> str:
    """How many steps, and every kind of finding with its first place and words."""
    found = [(line["step"], one["kind"], one["message"]) for line in lines for one in line.get("anomalies", ())]
    found += [(line["step"], "warning", words) for line in lines for words in line.get("warnings", ())]
    counts = Counter(kind for _step, kind, _message in found)
    first: dict[str, str] = {}
    for step, kind, message in found:
        first.setdefault(kind, f"first at step {step}: {message}")
    steps = {line["step"] for line in lines}
    head = f"{len(steps):,} steps, {min(steps)} to {max(steps)}; {len(found):,} findings\n"
    return head + "".join(f"{kind} ({count:,} times), {first[kind]}\n" for kind, count in counts.items())


_CURVES = (("loss", "loss", False), ("gradient_norm", "gradient norm", True), ("loss_scale", "loss scale", True))
_COLOURS = {"warning": "#d69900", "severe": "#c62828"}


def draw_training_steps(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a PNG or SVG, by the file's ending: a panel for each quantity that the log has, steps with findings marked.

    Args:
        lines: of `read_step_log`, or of the `metrics.jsonl` of a training.
        path: of the picture.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - it takes a second to load

    present = [curve for curve in _CURVES if any(curve[0] in line for line in lines)]
    figure = Figure(figsize=(9, 1 + 2.2 * len(present)), layout="constrained")
    panels = figure.subplots(len(present), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (name, label, logarithmic) in zip(panels, present, strict=True):
        _draw_curve(panel, [(line["step"], float(line[name])) for line in lines if name in line], logarithmic)
        panel.set_ylabel(label)
        _mark_findings(panel, lines)
    panels[-1].set_xlabel("step")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})


def _draw_curve(panel: "Axes", points: Sequence[tuple[int, float]], logarithmic: bool) -> None:
    """A line through what is finite; crosses at the upper edge where it is not."""
    steps = [step for step, _value in points]
    values = [value if math.isfinite(value) else math.nan for _step, value in points]
    panel.plot(steps, values, color="#2b6ca3", linewidth=1.2, marker="." if len(points) < 60 else None)
    lost = [step for step, value in points if not math.isfinite(value)]
    if lost:
        edge = panel.get_xaxis_transform()
        panel.scatter(lost, [0.97] * len(lost), transform=edge, marker="x", color="#c62828", label="not finite")
        panel.legend(fontsize=8)
    if logarithmic and any(value > 0 for value in values):
        panel.set_yscale("log")


def _mark_findings(panel: "Axes", lines: Sequence[Mapping[str, Any]]) -> None:
    for line in lines:
        severities = {found["severity"] for found in line.get("anomalies", ())}
        severities |= {"warning"} if line.get("warnings") else set()
        for severity, colour in _COLOURS.items():
            if severity in severities:
                panel.axvline(line["step"], color=colour, linewidth=0.8, alpha=0.5, zorder=0)


if __name__ == "__main__":
    sys.exit(main())
