"""What is known at one place of a file: values, gradients and their scale, the autocast region."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from instruments.static_check.autocast import BFLOAT16, FLOAT16, LOW, Region, autocast_table
from instruments.static_check.definitions import Definitions, Function
from instruments.static_check.source import Finding, Source

LOWS = frozenset({FLOAT16, BFLOAT16, LOW})


@dataclass(frozen=True)
class Value:
    """Of an expression."""

    precision: str | None = None  # float16, bfloat16, low, float32; None: not known
    scaled: bool = False  # a loss times the loss scale
    constant: bool = False

    @property
    def is_low(self) -> bool:
        """Surely in 16 bits."""
        return self.precision in LOWS


UNKNOWN = Value()


@dataclass
class State:
    """On one way through the code."""

    values: dict[str, Value] = field(default_factory=dict)
    facts: dict[str, bool] = field(default_factory=dict)  # conditions that were met or not on this way
    scaled: bool = False  # gradients are multiplied by the loss scale
    unscaled: frozenset[str] = frozenset()  # optimizers whose gradients may have been unscaled since
    surely_unscaled: frozenset[str] = frozenset()
    float16_forward: bool = False
    returned: Value | None = None
    ended: bool = False  # by return, raise, continue or break
    owners: set[str] = field(default_factory=set)  # names whose attributes have values, on this way or another

    def copy(self) -> "State":
        """A state whose changes leave this one alone; only `owners` is shared."""
        return replace(self, values=dict(self.values), facts=dict(self.facts))

    @property
    def gradients_scaled(self) -> bool:
        """Whether gradients are surely multiplied by the loss scale."""
        return self.scaled and not self.unscaled

    def forget_scale(self) -> None:
        """Gradients are no longer those of a scaled loss."""
        self.scaled, self.unscaled, self.surely_unscaled = False, frozenset(), frozenset()

    def note_region(self, region: Region) -> None:
        """A forward pass in float16 asks for loss scaling (LP302)."""
        self.float16_forward |= region.enabled and region.certain and region.dtype == FLOAT16

    def adopt(self, other: "State") -> None:
        """Become what another is, in place."""
        self.__dict__.update(other.copy().__dict__)


def join(states: Sequence[State]) -> State:
    """What is so on all of the ways; optimizers that may have been unscaled on any."""
    first = states[0].copy()
    for other in states[1:]:
        first.values = {name: value for name, value in first.values.items() if other.values.get(name) == value}
        first.facts = {fact: met for fact, met in first.facts.items() if other.facts.get(fact) == met}
        first.scaled &= other.scaled
        first.unscaled |= other.unscaled
        first.surely_unscaled &= other.surely_unscaled
        first.float16_forward |= other.float16_forward
        first.ended &= other.ended
        if first.returned != other.returned:
            first.returned = None
    return first


def mix(values: Sequence[Value]) -> Value:
    """Of an operation without a rule of its own: what torch's type promotion gives, as far as all parts are known."""
    precisions = {value.precision for value in values if not value.constant}
    if "float32" in precisions:
        return Value("float32")
    if not precisions or None in precisions:
        return Value(constant=not precisions)
    return Value(precisions.pop()) if len(precisions) == 1 else Value(LOW)


OFF = Region(enabled=False)


@dataclass
class Report:
    """Of one file; a place that is passed on several ways is reported once."""

    source: Source
    definitions: Definitions
    device: str  # where the file does not say
    findings: set[Finding] = field(default_factory=set)
    walked: set[int] = field(default_factory=set)  # functions, by id of their node
    evaluated: dict[int, set[str]] = field(default_factory=dict)  # function → what it calls eval() of
    calls: int = 0  # that were followed into functions of the file


@dataclass(frozen=True)
class Frame:
    """One function being walked."""

    report: Report
    region: Region = OFF
    class_name: str | None = None
    stack: tuple[Function, ...] = ()

    @property
    def definitions(self) -> Definitions:
        """Of the file."""
        return self.report.definitions

    @property
    def device(self) -> str:
        """Of the region; one that torch cannot be asked about counts as the device asked for."""
        return self.region.device if self.region.device in {"cuda", "cpu", "xpu", "mps"} else self.report.device

    def fate(self, operation: str) -> str:
        """What autocast does to it here; kept outside."""
        return autocast_table(self.device).get(operation, "kept") if self.region.enabled else "kept"
