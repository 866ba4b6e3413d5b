"""What is known at one place of a file: values, modules, gradients and their scale, the autocast region."""

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from instruments.static_check.autocast import BFLOAT16, FLOAT16, FLOAT32, LOW, autocast_table, called_name
from instruments.static_check.definitions import Definitions, Function
from instruments.static_check.source import Finding, Source

LOWS = frozenset({FLOAT16, BFLOAT16, LOW})


@dataclass(frozen=True)
class Region:
    """Autocast, on or off."""

    enabled: bool = True
    device: str | None = None  # None: not said in the file
    dtype: str = LOW
    certain: bool = True  # False: whether it is on is decided at run time


@dataclass(frozen=True)
class Value:
    """Of an expression."""

    precision: str | None = None  # float16, bfloat16, low, float32; None: not known
    origin: str = ""  # of a 16-bit precision: cast, weights or autocast
    tag: str = ""  # the last operations, as far as a rule asks for them: softmax, exp, sum_exp, square, mean ...
    scaled: bool = False  # a loss times the loss scale
    constant: float | str | None = None
    kind: str = ""  # module, optimizer, scheduler, scaler, accelerator, loss, region, dtype, parts, parameters, other
    ref: object = None  # of a module its key, of a loss its operation; a region; the parts of a tuple
    cast: ast.expr | None = None  # where it was made a 16-bit value

    @property
    def is_low(self) -> bool:
        """Surely in 16 bits."""
        return self.precision in LOWS and self.kind != "dtype"

    @property
    def is_constant(self) -> bool:
        """A literal number or text."""
        return self.constant is not None


UNKNOWN = Value()
OTHER = Value(kind="other")


@dataclass(frozen=True)
class Call:
    """A call whose parts have been evaluated."""

    node: ast.Call
    base: Value  # what the method is of
    arguments: list[Value]
    words: dict[str, Value]

    @property
    def word(self) -> str:
        """The name alone that is called."""
        return called_name(self.node)

    @property
    def every(self) -> list[Value]:
        """All that is given."""
        return [*self.arguments, *self.words.values()]


@dataclass(frozen=True)
class Module:
    """A model or a part of one; several names may stand for it."""

    name: str = ""  # of its class: one of this file, or torch's
    precision: str | None = None
    cast: ast.expr | None = None  # where its weights were made 16-bit
    trained: bool = False  # an optimizer holds its parameters
    idle: bool = False  # frozen, or in evaluation mode
    parts: tuple[Value, ...] = ()


@dataclass
class State:
    """On one way through the code."""

    values: dict[str, Value] = field(default_factory=dict)
    modules: dict[object, Module] = field(default_factory=dict)
    facts: dict[str, bool] = field(default_factory=dict)  # conditions that were met or not on this way
    scaled: bool = False  # gradients are multiplied by the loss scale
    plain: bool = False  # backward was called on a loss that is not scaled
    unscaled: frozenset[str] = frozenset()  # optimizers whose gradients may have been unscaled since
    surely_unscaled: frozenset[str] = frozenset()
    stepped: frozenset[str] = frozenset()  # optimizers that the scaler surely stepped since its update
    done: frozenset[str] = frozenset()  # optimizers that the scaler surely stepped since the last backward
    float16_forward: bool = False
    default: ast.expr | None = None  # where float16 was made the default of new tensors
    returned: Value | None = None
    ended: bool = False  # by return, raise, continue or break
    owners: set[str] = field(default_factory=set)  # names whose attributes have values, on this way or another

    def copy(self) -> "State":
        """A state whose changes leave this one alone; only `owners` is shared."""
        return replace(self, values=dict(self.values), modules=dict(self.modules), facts=dict(self.facts))

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
        first.modules = other.modules | first.modules
        first.facts = {fact: met for fact, met in first.facts.items() if other.facts.get(fact) == met}
        for way in ("scaled", "plain", "ended"):
            setattr(first, way, getattr(first, way) and getattr(other, way))
        first.unscaled |= other.unscaled
        for sure in ("surely_unscaled", "stepped", "done"):
            setattr(first, sure, getattr(first, sure) & getattr(other, sure))
        first.float16_forward |= other.float16_forward
        first.default = first.default or other.default
        if first.returned != other.returned:
            first.returned = None
    return first


def mix(values: Sequence[Value]) -> Value:
    """Of an operation without a rule of its own: what torch's type promotion gives, as far as all parts are known."""
    tensors = [value for value in values if not value.is_constant]
    precisions = {value.precision for value in tensors}
    if FLOAT32 in precisions:
        return Value(FLOAT32)
    if not precisions or None in precisions:
        return UNKNOWN
    first = tensors[0]
    return Value(precisions.pop() if len(precisions) == 1 else LOW, origin=first.origin)


def element_of(value: Value) -> Value:
    """What a loop over it gives."""
    if value.kind == "zip":
        return replace(value, kind="parts")
    if value.kind == "parameters":
        return replace(value, kind="parameter")
    if value.kind == "parts" and isinstance(value.ref, tuple) and value.ref:
        return value.ref[0] if all(part == value.ref[0] for part in value.ref) else UNKNOWN
    return value if value.kind in {"", "module", "parameter"} and not value.is_constant else UNKNOWN


OFF = Region(enabled=False)


@dataclass
class Report:
    """Of one file; a place that is passed on several ways is reported once."""

    source: Source
    definitions: Definitions
    device: str  # where the file does not say
    findings: set[Finding] = field(default_factory=set)
    walked: set[int] = field(default_factory=set)  # functions, by id of their node
    attributes: dict[str, dict[str, Value]] = field(default_factory=dict)  # class → values of `self.…`
    outer: dict[str, Value] = field(default_factory=dict)  # the file's own names
    modules: dict[object, Module] = field(default_factory=dict)  # of them all
    calls: int = 0  # that were followed into functions of the file
    follow: Callable[..., Value] = lambda *_: UNKNOWN  # walk.call_function: into a function of the file


@dataclass(frozen=True)
class Frame:
    """One function being walked."""

    report: Report
    region: Region = OFF
    class_name: str | None = None
    stack: tuple[Function, ...] = ()
    weights: str | None = None  # precision of the module whose method this is
    no_grad: bool = False
    in_loop: int = 0  # loops around it

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

    @property
    def is_lightning(self) -> bool:
        """Inside a LightningModule."""
        return bool(self.class_name) and self.definitions.inherits(str(self.class_name), "LightningModule")
