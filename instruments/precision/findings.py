"""What a comparison of FP32 with low precision found."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from instruments.precision.calls import Call
from instruments.precision.comparison import Distance, Verdict, judge, worst
from instruments.precision.formats import AxisRange


@dataclass
class OutputDiff:
    """One floating-point output of one call of one module; in the order in which calls end."""

    call: Call
    path: str  # within what it returns, such as "[0]"
    kind: str  # class of the module
    parts: int  # modules below it
    shape: tuple[int, ...]
    dtype: str = ""  # in low precision
    propagated: Distance | None = None  # low precision from the start; None where it did not get here
    propagated_floor: float | None = None
    unaligned: float = 0.0  # normalised L2 of `propagated` with the tokens that chose otherwise
    own: Distance | None = None  # low precision fed with the FP32 inputs
    own_floor: float | None = None
    own_failure: str = ""
    ranges: Sequence[AxisRange] = ()
    drowned: str = ""

    @property
    def name(self) -> str:
        """The call, and which of its outputs."""
        return f"{self.call}{self.path}"

    @property
    def own_verdict(self) -> Verdict:
        """On the module itself."""
        if self.own is None:
            return Verdict.WARNING if self.own_failure else Verdict.OK
        found = judge(self.own.normalised_l2, self.own_floor, self.own.nonfinite)
        return worst(found, Verdict.WARNING) if self.drowned else found

    @property
    def propagated_verdict(self) -> Verdict:
        """On what arrives here."""
        if self.propagated is None:
            return Verdict.OK
        return judge(self.propagated.normalised_l2, self.propagated_floor, self.propagated.nonfinite)

    @property
    def verdict(self) -> Verdict:
        """The worse of the two."""
        return worst(self.own_verdict, self.propagated_verdict)


@dataclass
class ChoiceDiff:
    """One integer output: how many rows (tokens) chose otherwise in low precision."""

    call: Call
    path: str
    rows: int
    own: float | None = None  # fed with the FP32 inputs
    propagated: float | None = None
    floor: float | None = None  # in FP32, every tensor off by one unit in the last place


@dataclass
class Diff:
    """FP32 against low precision, for every output of every module that ran."""

    precision: str
    mode: str
    outputs: list[OutputDiff] = field(default_factory=list)
    choices: list[ChoiceDiff] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)  # modules that were never called
    silent: list[str] = field(default_factory=list)  # calls without a tensor in what they return
    only_one: list[str] = field(default_factory=list)  # calls that one of the runs made, and not the other
    passes: int = 0
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """The worst of all."""
        return worst(*(output.verdict for output in self.outputs))

    def ranked(self) -> list[OutputDiff]:
        """What is not ok, the first divergence on top: modules that err themselves, then those that inherit it."""
        found = [output for output in self.outputs if output.verdict is not Verdict.OK]
        return sorted(found, key=lambda output: output.own_verdict is Verdict.OK)

    @property
    def first(self) -> OutputDiff | None:
        """The first divergence: of those that err themselves, the one whose call ended first.

        A module ends after its parts, so it is the innermost.
        """
        return next(iter(self.ranked()), None)
