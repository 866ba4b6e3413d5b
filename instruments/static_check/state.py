"""Facts known at one place of a file: values, modules, gradients and their scale, the autocast region."""

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from instruments.static_check.autocast import AUTOCASTS, BFLOAT16, DTYPES, FLOAT16, FLOAT32, LOW, autocast_table
from instruments.static_check.definitions import Definitions, Function
from instruments.static_check.source import NOTE, RULES, SEVERE, WARNING, Finding, Source

LOWS = frozenset({FLOAT16, BFLOAT16, LOW})


@dataclass(frozen=True)
class Region:
    """A region with autocast on or off."""

    enabled: bool = True
    device: str | None = None  # None: not known from the file
    dtype: str = LOW
    certain: bool = True  # False: enabled or not at run time


@dataclass(frozen=True)
class Value:
    """Known properties of an expression."""

    precision: str | None = None  # float16, bfloat16, low, float32; None: not known
    origin: str = ""  # of a 16-bit precision: cast, weights or autocast
    tag: str = ""  # the last operations that matter to a rule: softmax, exp, sum_exp, square, mean ...
    scaled: bool = False  # a loss times the loss scale
    constant: float | str | None = None
    kind: str = ""  # module, optimizer, scheduler, scaler, accelerator, loss, region, dtype, parts, parameters, other
    ref: object = None  # key of a module, operation of a loss, Region, elements of a tuple
    cast: ast.expr | None = None  # where it was cast to 16 bits

    @property
    def is_low(self) -> bool:
        """Whether it is certainly in 16 bits."""
        return self.precision in LOWS and self.kind != "dtype"

    @property
    def is_constant(self) -> bool:
        """Whether it is a literal number or text."""
        return self.constant is not None

    @property
    def number(self) -> float | None:
        """The constant, if it is a number."""
        return self.constant if isinstance(self.constant, float | int) else None

    @property
    def element(self) -> "Value":
        """Its element in a loop over it."""
        if self.kind in {"zip", "parameters"}:
            return replace(self, kind="parts" if self.kind == "zip" else "parameter")
        if self.kind == "parts" and isinstance(self.ref, tuple) and self.ref:
            return self.ref[0] if all(part == self.ref[0] for part in self.ref) else UNKNOWN
        return self if self.kind in {"", "module", "parameter", "optimizer"} and not self.is_constant else UNKNOWN


UNKNOWN = Value()
OTHER = Value(kind="other")


@dataclass(frozen=True)
class Call:
    """A call with evaluated arguments."""

    node: ast.Call
    word: str  # last name of the called function
    base: Value  # the method's object
    arguments: list[Value]
    words: dict[str, Value]

    @property
    def every(self) -> list[Value]:
        """All arguments."""
        return [*self.arguments, *self.words.values()]


@dataclass(frozen=True)
class Module:
    """A model or a submodule; several names may refer to it."""

    name: str = ""  # of its class, in this file or in torch
    precision: str | None = None
    cast: ast.expr | None = None  # where its weights were cast to 16 bits
    trained: bool = False  # an optimizer holds its parameters
    idle: bool = False  # frozen, or in evaluation mode


@dataclass
class State:
    """Facts known on one way through the code."""

    values: dict[str, Value] = field(default_factory=dict)
    modules: dict[object, Module] = field(default_factory=dict)
    facts: dict[str, bool] = field(default_factory=dict)  # condition → whether it holds on this way
    scaled: bool = False  # gradients are multiplied by the loss scale
    plain: bool = False  # backward was called on an unscaled loss
    unscaled: frozenset[str] = frozenset()  # optimizers whose gradients may have been unscaled since backward
    surely_unscaled: frozenset[str] = frozenset()
    done: frozenset[str] = frozenset()  # optimizers with a certain scaler.step() since the last backward
    forward: frozenset[str] = frozenset()  # formats of the autocast regions so far
    backed: bool = False  # a backward pass since the last step
    clipped: ast.expr | None = None  # where gradients were clipped before it
    default: ast.expr | None = None  # where float16 became the default type of new tensors
    returned: Value | None = None
    ended: bool = False  # by return, raise, continue or break
    owners: set[str] = field(default_factory=set)  # names whose attributes have values, on any way

    def module(self, key: object) -> Module:
        """The module with this key, or a module without known facts."""
        return self.modules.get(key, Module())

    def copy(self) -> "State":
        """An independent copy; only `owners` is shared."""
        return replace(self, values=dict(self.values), modules=dict(self.modules), facts=dict(self.facts))

    @property
    def gradients_scaled(self) -> bool:
        """Whether gradients are certainly multiplied by the loss scale."""
        return self.scaled and not self.unscaled

    def forget_scale(self) -> None:
        """Reset: the gradients no longer come from a scaled loss."""
        self.scaled, self.unscaled, self.surely_unscaled = False, frozenset(), frozenset()

    def note_region(self, region: Region) -> None:
        """Record the format of a forward pass: float16 needs loss scaling (LP302)."""
        self.forward |= {region.dtype} if region.enabled and region.certain else frozenset()

    def adopt(self, other: "State") -> None:
        """Become another state, which ends."""
        self.__dict__.update(other.__dict__)


def either(first: Value | None, second: Value | None) -> Value | None:
    """Value that is one of two: of two types or tensors in 16 bits, one in 16 bits; None if nothing is known of it."""
    if first is second or first is None or second is None or first == second:
        return first if second is not None else None
    if first.is_constant and {DTYPES.get(str(one.constant)) for one in (first, second)} <= LOWS:
        return Value(constant=LOW)
    low = first.precision in LOWS and second.precision in LOWS and first.kind == second.kind in {"", "dtype"}
    return Value(LOW, first.origin, kind=first.kind) if low else None


def join(states: Sequence[State]) -> State:
    """Join ways: facts that hold on all of them; optimizers that may have been unscaled on any."""
    first = states[0].copy()
    for other in states[1:]:
        both = ((name, either(value, other.values.get(name))) for name, value in first.values.items())
        first.values = {name: value for name, value in both if value is not None}
        first.modules = other.modules | first.modules
        first.facts = {fact: met for fact, met in first.facts.items() if other.facts.get(fact) == met}
        for way in ("scaled", "plain", "ended", "clipped"):
            setattr(first, way, getattr(first, way) and getattr(other, way))
        first.unscaled |= other.unscaled
        for sure in ("surely_unscaled", "done"):
            setattr(first, sure, getattr(first, sure) & getattr(other, sure))
        first.forward |= other.forward
        first.backed |= other.backed
        first.default = first.default or other.default
        first.returned = either(first.returned, other.returned)
    return first


def mix(values: Sequence[Value]) -> Value:
    """Result of an operation without a rule of its own, by torch's type promotion; UNKNOWN if it is not certain."""
    tensors = [value for value in values if not value.is_constant]
    precisions = {value.precision for value in tensors}
    if FLOAT32 in precisions:
        return Value(FLOAT32)
    if not precisions or None in precisions:
        return UNKNOWN
    return Value(precisions.pop() if len(precisions) == 1 else LOW, origin=tensors[0].origin)


OFF = Region(enabled=False)


@dataclass
class FileFacts:
    """Findings and shared facts of one file; a place reached on several ways is reported once."""

    source: Source
    definitions: Definitions
    device: str  # if the file does not name it
    findings: set[Finding] = field(default_factory=set)
    walked: set[int] = field(default_factory=set)  # functions, by id of their node
    attributes: dict[str, dict[str, Value]] = field(default_factory=dict)  # class → values of `self.…`
    outer: dict[str, Value] = field(default_factory=dict)  # global names of the file
    modules: dict[object, Module] = field(default_factory=dict)  # of all scopes
    calls: int = 0  # calls followed so far into functions of the file
    follow: Callable[..., Value] = lambda *_: UNKNOWN  # set to walk.call_function


@dataclass(frozen=True)
class Frame:
    """One function being walked."""

    file: FileFacts
    region: Region = OFF
    class_name: str | None = None
    stack: tuple[Function, ...] = ()
    weights: str | None = None  # precision of the module whose method this is
    no_grad: bool = False
    in_loop: int = 0  # number of enclosing loops

    @property
    def definitions(self) -> Definitions:
        """Definitions of the file."""
        return self.file.definitions

    @property
    def device(self) -> str:
        """Device of the region; the report's device if it is unknown or cannot be probed."""
        return self.region.device if self.region.device in {"cuda", "cpu", "xpu", "mps"} else self.file.device

    def fate(self, operation: str) -> str:
        """Effect of autocast on an operation here; "kept" outside autocast."""
        return autocast_table(self.device).get(operation, "kept") if self.region.enabled else "kept"

    @property
    def is_lightning(self) -> bool:
        """Whether the function is in a LightningModule."""
        return bool(self.class_name) and self.definitions.inherits(str(self.class_name), "LightningModule")

    def report(self, code: str, node: ast.expr, message: str, severity: str | None = None) -> None:
        """Record a finding, unless a `noqa` comment silences it."""
        rule, source = RULES[code], self.file.source
        if not source.is_silenced(code, node):
            severity = severity or rule["severity"]
            place = *source.place(node.lineno), node.col_offset
            self.file.findings.add(Finding(*place, code, message, severity, rule["why"], rule["fix"]))

    def grade(self, precision: str | None) -> str:
        """Severity of a formula that loses digits in every format, by the precision of its values."""
        if precision == FLOAT16 and not self.region.enabled:
            return SEVERE
        return WARNING if precision in LOWS or self.region.enabled or self.weights is not None else NOTE


# Contexts of accelerate, Fabric and transformers' Trainer, which follow the library's mixed_precision setting.
_MANAGED = {"autocast", "compute_loss_context_manager", "autocast_smart_context_manager"}
_DEFAULTS = {"cuda": FLOAT16, "cpu": "bfloat16"}


def read_region(call: Call, frame: Frame) -> Region | None:
    """The autocast region that a call opens; None for other calls."""
    node, word, every, words = call.node, call.word, call.every, call.words
    if word == "partial" and node.args:
        node, every = ast.copy_location(ast.Call(node.args[0], node.args[1:], node.keywords), node), every[1:]
        word = frame.definitions.called_name(node)
    full = frame.definitions.full_name(node.func)
    if full not in AUTOCASTS:
        off = any(one.arg == "enabled" and getattr(one.value, "value", True) is False for one in node.keywords)
        if off and "autocast" in word:
            return Region(enabled=False)
        if word not in _MANAGED:
            return None
        policy = frame.definitions.policy("accelerate", "lightning")
        precision = policy.precision if policy and policy.precision in LOWS else None
        return Region(True, "cuda", precision) if precision else Region(certain=False)
    device = next((kind for kind in ("cuda", "cpu") if f"{kind}.amp" in full), None)
    enabled = next((one.value for one in node.keywords if one.arg == "enabled"), None)
    if device is not None:  # torch.cuda.amp.autocast(enabled, dtype)
        enabled = node.args[0] if node.args else enabled
    else:
        kind = words.get("device_type") or (every[0] if node.args else UNKNOWN)
        device = kind.constant.partition(":")[0] if isinstance(kind.constant, str) else None
    off = isinstance(enabled, ast.Constant) and enabled.value is False
    dtype = words.get("dtype") or (every[1] if len(node.args) > 1 else None)
    if dtype is None:
        return Region(not off, device, _DEFAULTS.get(device or "", LOW))
    return Region(enabled=False) if dtype.precision == "float32" else Region(not off, device, dtype.precision or LOW)
