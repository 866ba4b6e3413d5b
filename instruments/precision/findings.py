"""Results of auto_diff, module by module, and their table, notes, JSON and picture."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from instruments.errors import align, some
from instruments.files import plain_json
from instruments.hooks import Call
from instruments.precision.comparison import FORMATS, Distance
from instruments.precision.verdict import DiffLimits, Verdict, worst


@dataclass
class OutputDiff:
    """One floating-point output of one call of one module; in the order in which calls end."""

    call: Call
    path: str  # within the returned value, such as "[0]"
    kind: str  # class of the module
    parts: int  # number of modules inside it
    shape: tuple[int, ...]
    dtype: str = ""  # in low precision
    propagated: Distance | None = None  # whole model in low precision; None if it cannot be compared
    propagated_floor: float | None = None
    own: Distance | None = None  # only this module in low precision, on the FP32 inputs
    own_floor: float | None = None
    own_failure: str = ""
    overflow: str = ""  # in the module's own forward, between its submodules
    limits: DiffLimits = field(default_factory=DiffLimits, repr=False)

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}) {self.verdict}: {reason(self)}".rstrip(": ")

    @property
    def name(self) -> str:
        """The call and the path of the output."""
        return f"{self.call}{self.path}"

    @property
    def own_verdict(self) -> Verdict:
        """Verdict on the module's own error."""
        if self.overflow:
            return Verdict.SEVERE
        if self.own is None:
            return Verdict.WARNING if self.own_failure else Verdict.OK
        return self.limits.judge(self.own, self.own_floor)

    @property
    def propagated_verdict(self) -> Verdict:
        """Verdict on the propagated error; the model's own output is also held to the absolute limits."""
        if self.propagated is None:
            return Verdict.OK
        return worst(self.limits.judge(self.propagated, self.propagated_floor), self.bound_verdict)

    @property
    def bound_verdict(self) -> Verdict:
        """Verdict on the model's own output by the absolute limits alone; ok for other modules."""
        if self.propagated is None or self.call.module:
            return Verdict.OK
        return self.limits.judge(self.propagated, None)

    @property
    def verdict(self) -> Verdict:
        """The worse of the own and the propagated verdict."""
        return worst(self.own_verdict, self.propagated_verdict)


@dataclass
class ChoiceDiff:
    """One integer output: which share of its rows (tokens) differs in low precision."""

    call: Call
    path: str
    propagated: float | None  # None: the shapes differ


@dataclass
class Diff:
    """FP32 against low precision, for every output of every module that ran."""

    precision: str
    mode: str
    limits: DiffLimits = field(default_factory=DiffLimits)
    outputs: list[OutputDiff] = field(default_factory=list)
    choices: list[ChoiceDiff] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)  # modules that were never called
    only_one: list[str] = field(default_factory=list)  # calls made in only one of the two runs
    overflows: list[str] = field(default_factory=list)  # the first overflow, if it is between modules

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all outputs; severe for an overflow between modules."""
        return worst(*(output.verdict for output in self.outputs), *[Verdict.SEVERE] * bool(self.overflows))

    def ranked(self) -> list[OutputDiff]:
        """Outputs that are not ok, in order: modules with a severe error of their own, with a warning, with none."""
        found = [output for output in self.outputs if output.verdict is not Verdict.OK]
        return sorted(found, key=lambda output: [*Verdict].index(output.own_verdict), reverse=True)

    @property
    def first(self) -> OutputDiff | None:
        """The first divergence: among modules with the worst error of their own, the one whose call ended first.

        A module ends after its submodules, so this is the innermost. If only the model's output is above its absolute
        limit, it is the module at which the error floor jumps.
        """
        if not (found := self.ranked()):
            return None
        bound = all(output.bound_verdict == output.verdict for output in found)
        return found[0] if found[0].own_verdict is not Verdict.OK or not bound else self.jump or found[0]

    @property
    def jump(self) -> OutputDiff | None:
        """The first output with a large own floor: at least half of the largest, and 4 units in the last place.

        A module without submodules comes first if its floor is a tenth of the largest: what runs before it adds to
        the floor of the module around both.
        """
        least = 4 * torch.finfo(FORMATS[self.precision]).eps  # a Linear makes 1.4 units of one
        found = [(output.own_floor or 0.0, output) for output in self.outputs]
        most = max((floor for floor, _output in found if math.isfinite(floor)), default=0.0)
        leaves = [(floor, output) for floor, output in found if not output.parts and floor >= max(least, most / 10)]
        high = max((floor for floor, _output in leaves), default=most)
        return next((output for floor, output in leaves or found if floor >= max(least, high / 2)), None)

    def __str__(self) -> str:
        title = f"FP32 against {self.precision} ({self.mode}): {self.verdict}"
        return "\n".join([title, *align([COLUMNS, *rows_of(self)]), *notes_of(self)])


COLUMNS = (
    "output", "verdict", "own L2", "÷ floor", "propagated L2", "÷ floor", "max rel.", "cosine", "SQNR dB",
)  # fmt: skip


def rows_of(diff: Diff) -> list[tuple[str, ...]]:
    """Rows of outputs that are not ok, the first divergence on top; without any, of those nearest their limit."""
    found = diff.ranked() or sorted(diff.outputs, key=_nearness, reverse=True)
    return [_row(output) for output in found[:20]]


def _nearness(output: OutputDiff) -> float:
    return max(_ratio(output.own, output.own_floor), _ratio(output.propagated, output.propagated_floor))


def _ratio(distance: Distance | None, floor: float | None) -> float:
    return distance.normalised_l2 / floor if distance is not None and floor else 0.0


def _row(output: OutputDiff) -> tuple[str, ...]:
    arrived = output.propagated
    sizes: tuple[str, ...] = ("",) * 3
    if arrived is not None and not arrived.nonfinite:
        sizes = f"{arrived.max_relative:.2g}", f"{arrived.cosine:.6f}", f"{arrived.sqnr_db:.1f}"
    figures = *_figures(output.own, output.own_floor), *_figures(arrived, output.propagated_floor), *sizes
    return output.name, str(output.verdict), *figures


def _figures(distance: Distance | None, floor: float | None) -> tuple[str, str]:
    if distance is None:
        return "", ""
    size = f"{distance.nonfinite} not finite" if distance.nonfinite else f"{distance.normalised_l2:.2g}"
    return size, f"{_ratio(distance, floor):.2f}" if floor else ""


def notes_of(diff: Diff) -> list[str]:
    """The verdict in words, the error of the final output, and all warnings."""
    return [_verdict(diff), *_summary(diff), *_oddities(diff), f"{len(diff.outputs):,} outputs"]


def _verdict(diff: Diff) -> str:
    if not diff.outputs:
        return "nothing was compared: no module returned a floating-point tensor"
    if (first := diff.first) is None:
        nearest = max(diff.outputs, key=_nearness)
        return (
            f"ok: the largest error is that of {nearest.name}, {_nearness(nearest):.2f} times the error floor "
            f"(rounding alone: 0.29; a warning: {diff.limits.warning_ratio:g})"
        )
    itself = "errs itself"
    if first.own_verdict is Verdict.OK:
        if end := next((one for one in diff.outputs if one.bound_verdict is not Verdict.OK), None):
            return f"{diff.verdict}: {_end(diff, end)}"
        itself = "inherits an error that no module makes alone"
    return f"{diff.verdict}: the first divergence is {first.name} ({first.kind}), which {itself}: {reason(first)}"


def _end(diff: Diff, end: OutputDiff) -> str:
    """Explain why the model's own output is too far off although no module errs by itself."""
    assert end.propagated is not None, "it has a verdict"
    error, jump = end.propagated.normalised_l2, diff.jump
    bound = diff.limits.output_severe if error > diff.limits.output_severe else diff.limits.output_warning
    said = f"the output {end.name} has a normalised error of {error:.2g}, above {bound:g}, and no module errs by itself"
    if jump is None:
        return f"{said}: the roundings of its {end.parts} modules add up"
    inside = " or inside it" if jump.parts else ""
    return (
        f"{said}: the error floor jumps at {jump.name} ({jump.kind}){inside}, to {jump.own_floor:.2g} for one unit in "
        f"the last place of {diff.precision}; give it FP32 inputs, or smaller ones (subtract a mean before), unless it "
        "makes a discrete choice (argmin, top-k), which may change near the border"
    )


def reason(output: OutputDiff) -> str:
    """Explain why an output is not ok."""
    own = output.own_verdict is not Verdict.OK
    distance, floor = (output.own, output.own_floor) if own else (output.propagated, output.propagated_floor)
    if said := output.overflow:
        return said
    if output.own_failure:
        return f"it does not run on the FP32 inputs: {output.own_failure}"
    if distance is None:
        return ""
    if distance.nonfinite:
        return (
            f"{distance.nonfinite:,} of {distance.nonfinite + distance.size:,} values overflow or are undefined "
            f"(largest in FP32 where both are finite: {distance.largest:.3g})"
        )
    times = f", {distance.normalised_l2 / floor:.1f} times its error floor" if floor else ""
    return f"normalised L2 {distance.normalised_l2:.2g}{times}"


def _summary(diff: Diff) -> Iterator[str]:
    """The error of the last output, and how many discrete choices differ."""
    if diff.outputs and (arrived := diff.outputs[-1].propagated) is not None:
        figures = f"normalised L2 {arrived.normalised_l2:.2g}, cosine {arrived.cosine:.6f}, "
        figures += f"SQNR {arrived.sqnr_db:.1f} dB"
        if arrived.nonfinite:
            figures = f"{arrived.nonfinite:,} of {arrived.nonfinite + arrived.size:,} values are not finite"
        yield f"at the end ({diff.outputs[-1].name}): {figures}"
    if not (known := [(choice.propagated, choice) for choice in diff.choices if choice.propagated is not None]):
        return
    most, worst = max(known, key=lambda pair: pair[0])
    yield (
        f"discrete choices (experts of a token): {fmean(share for share, _ in known):.1%} differ in the mean of "
        f"{len(known)} modules, {most:.1%} at most ({worst.call}). Tokens near the border may change their choice, "
        "which is no error: from that module on they are left out of the figures above"
    )


def _oddities(diff: Diff) -> Iterator[str]:
    failed = [output.name for output in diff.outputs if output.own_failure]
    undefined = [one.name for one in diff.outputs if one.propagated and one.propagated.reference_nonfinite]
    for names, words in (
        (undefined, "outputs are not finite in FP32 either; only their finite values are compared"),
        (failed, "modules could not be run alone in low precision"),
        (diff.unused, "modules never ran on this sample, and are not judged"),
        (diff.only_one, "calls were made by one of the two runs alone"),
        (diff.overflows, "overflow between modules"),
    ):
        if names:
            yield f"{len(names)} {words}: {some(names, 3, ', ')}"


def to_json(diff: Diff) -> dict[str, Any]:
    """All results; non-finite figures as text."""
    judged = ("name", "verdict", "own_verdict", "propagated_verdict")
    outputs = [asdict(output) | {name: getattr(output, name) for name in judged} for output in diff.outputs]
    for output in outputs:
        del output["limits"]
    found: dict[str, Any] = plain_json(asdict(diff) | {"verdict": diff.verdict, "outputs": outputs})
    return found | {"notes": notes_of(diff)}


_COLOURS = {Verdict.OK: "#2b6ca3", Verdict.WARNING: "#d69900", Verdict.SEVERE: "#c62828"}
_NAMED = 8  # findings labelled with their module names


def draw_diff(diff: Diff, path: Path) -> None:
    """Write a PNG: propagated errors above, own errors below; dots coloured by verdict, overflows at the top."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - it takes a second to load

    figure = Figure(figsize=(11, 7), dpi=110, layout="constrained")
    figure.suptitle(f"FP32 against {diff.precision} ({diff.mode}): {diff.verdict}")
    panels, places = figure.subplots(2, 1, sharex=True), range(len(diff.outputs))
    for panel, name in zip(panels, ("propagated", "own"), strict=True):
        errors = [_error(getattr(output, name)) for output in diff.outputs]
        held = [getattr(output, f"{name}_floor") for output in diff.outputs]
        floors = [floor if floor and floor < math.inf else math.nan for floor in held]
        verdicts = [getattr(output, f"{name}_verdict") for output in diff.outputs]
        known = [value for value in (*errors, *floors) if 0 < value < math.inf] or [diff.limits.output_warning]
        top, bottom = 3 * max(*known, diff.limits.output_severe), min(known) / 3
        limits = [diff.limits.warning_ratio * floor for floor in floors]
        panel.fill_between(places, bottom, limits, color="#e4edf5", linewidth=0, label="below the warning limit")
        panel.plot(places, floors, color="#8fb0cc", linewidth=1, label="FP32 off by one unit in the last place")
        shown = [min(max(error, bottom), top) for error in errors]
        panel.scatter(places, shown, s=10, c=[_COLOURS[verdict] for verdict in verdicts], label=name, zorder=3)
        panel.set_yscale("log")
        panel.set_ylim(bottom, 1.3 * top)
        panel.set_ylabel(f"{name} error (normalised L2)")
        panel.legend(fontsize=8, loc="lower right")
    found = [place for place, output in enumerate(diff.outputs) if output.own_verdict is not Verdict.OK]
    for place in found[:_NAMED]:
        panel.axvline(place, color="#cccccc", linewidth=0.8, zorder=0)
        name = diff.outputs[place].name
        panel.text(place, panel.get_ylim()[1], name, fontsize=7, rotation=90, va="top", ha="right")
    panel.set_xlabel("outputs, in the order of execution")
    figure.savefig(path, format="png", metadata={"Software": None})


def _error(distance: Distance | None) -> float:
    if distance is None:
        return math.nan
    return math.inf if distance.nonfinite else distance.normalised_l2
