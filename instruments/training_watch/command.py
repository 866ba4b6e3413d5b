"""`python -m pipeline.watch_log FILE --plot OUT`: what a monitored training did, step by step."""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instruments.command_line import check_output, exit_code, say
from instruments.errors import ContractError
from instruments.training_watch.findings import read_step_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def main(words: Sequence[str] | None = None) -> int:
    """Do what the command line says; returns the exit code.

    0 done, 1 the file is no such log, 2 the command line is wrong, 130 interrupted.
    """
    parser = argparse.ArgumentParser(prog="python -m pipeline.watch_log", description=__doc__)
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
