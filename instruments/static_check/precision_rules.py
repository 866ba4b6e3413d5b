"""The rules on gradients, casts, losses and reductions."""

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from instruments.static_check.definitions import (
    BFLOAT16,
    FLOAT16,
    LOSSES,
    LOW,
    PRODUCTS,
    REDUCTIONS,
    SOFTMAXES,
    Definitions,
    Function,
    Region,
    autocast_table,
    last_word,
    read_dtype,
    text_of,
)
from instruments.static_check.source import RULES, WARNING, Finding, Source

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

    def forget_scale(self) -> None:
        """Gradients are no longer those of a scaled loss."""
        self.scaled, self.unscaled, self.surely_unscaled = False, frozenset(), frozenset()

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

    def add(self, code: str, node: ast.expr, message: str, severity: str | None = None) -> None:
        """Note a finding, unless a comment asks for silence."""
        if not self.source.is_silenced(code, node):
            place = (self.source.path, node.lineno, node.col_offset)
            self.findings.add(Finding(*place, code, message, severity or RULES[code].severity))


@dataclass(frozen=True)
class Frame:
    """One function being walked."""

    report: Report
    call: Callable[["Frame", State, Function, str | None, ast.Call, list[Value]], Value]  # walk into a function
    region: Region = OFF
    class_name: str | None = None
    stack: tuple[Function, ...] = ()

    @property
    def device(self) -> str:
        """Of the region; one that torch cannot be asked about counts as the device asked for."""
        return self.region.device if self.region.device in {"cuda", "cpu", "xpu", "mps"} else self.report.device

    def fate(self, operation: str) -> str:
        """What autocast does to it here; kept outside."""
        if not self.region.enabled:
            return "kept"
        return autocast_table(self.device).get(operation, "kept")


_CLIPS = {"clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "clip_grads_with_norm_", "get_total_norm"}
_CHECKS = {"norm", "isnan", "isinf", "isfinite", "vector_norm", "abs", "max", "mean", "sum", "std", "any", "all"}
# They unscale by themselves.
_MANAGERS = {"accelerator", "fabric", "self", "trainer", "engine"}


def check_gradients(node: ast.Call, arguments: list[Value], state: State, frame: Frame) -> Value | None:
    """What a call does to gradients and their scale; None where it has nothing to do with them."""
    _check_look(node, state, frame)
    word = node.func.attr if isinstance(node.func, ast.Attribute) else text_of(node.func) or ""
    if word in _CLIPS:
        return _clip(node, state, frame)
    if not isinstance(node.func, ast.Attribute):
        return None
    if word in {"backward", "manual_backward"}:
        return _backward(node, node.func, arguments, state, frame)
    if frame.report.definitions.is_scaler(node.func.value):
        return _scaler(node, node.func, state, frame)
    if word == "step" and frame.report.definitions.is_optimizer(node.func.value):
        return _step(node, node.func, state, frame)
    return None


def _backward(node: ast.Call, func: ast.Attribute, arguments: list[Value], state: State, frame: Frame) -> Value:
    scaled = _is_scaled(func.value, state, frame) or any(value.scaled for value in arguments)
    owner = last_word(text_of(func.value))
    if frame.region.enabled and owner not in {"super", "ctx"}:
        frame.report.add("LP301", node, f"{ast.unparse(node.func)}() inside an autocast block")
    managed = owner in _MANAGERS
    if scaled:
        state.forget_scale()
        state.scaled = True
    elif not managed:
        state.forget_scale()
        if state.float16_forward and not frame.report.definitions.scales:
            frame.report.add("LP302", node, "backward of a loss from float16 autocast, without loss scaling")
    return UNKNOWN


def _is_scaled(node: ast.expr, state: State, frame: Frame) -> bool:
    """`scaler.scale(loss)`, or a name that was bound to it."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "scale":
        return frame.report.definitions.is_scaler(node.func.value)
    value = state.values.get(text_of(node) or "")
    return value is not None and value.scaled


def _scaler(node: ast.Call, func: ast.Attribute, state: State, frame: Frame) -> Value | None:
    optimizer = ast.unparse(node.args[0]) if node.args else ""
    if func.attr == "scale":
        return Value(scaled=True)
    if func.attr == "unscale_":
        if optimizer in state.surely_unscaled:
            frame.report.add("LP203", node, f"{ast.unparse(node)} a second time before scaler.update()")
        state.unscaled |= {optimizer}
        state.surely_unscaled |= {optimizer}
    elif func.attr == "step":
        if func.value and not frame.report.definitions.updates(func.value):
            frame.report.add("LP202", node, f"{ast.unparse(node)} without {ast.unparse(func.value)}.update()")
        state.surely_unscaled -= {optimizer}
    elif func.attr == "update":
        state.forget_scale()
    else:
        return None
    return UNKNOWN


def _clip(node: ast.Call, state: State, frame: Frame) -> Value:
    owner = text_of(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    if state.scaled and not state.unscaled and last_word(owner) not in _MANAGERS:
        frame.report.add("LP201", node, f"{ast.unparse(node.func)}() of scaled gradients")
    return UNKNOWN


def _step(node: ast.Call, func: ast.Attribute, state: State, frame: Frame) -> Value:
    if state.scaled and not state.unscaled:
        frame.report.add("LP204", node, f"{ast.unparse(func)}() after the backward pass of a scaled loss")
    return UNKNOWN


def _check_look(node: ast.Call, state: State, frame: Frame) -> None:
    """LP205: `p.grad.norm()`, `torch.isnan(p.grad)`, before unscaling."""
    word = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if not state.scaled or state.unscaled or word not in _CHECKS:
        return
    parts = [node.func, *node.args]
    looks = any(isinstance(inner, ast.Attribute) and inner.attr == "grad" for part in parts for inner in ast.walk(part))
    undone = any("scale" in str(getattr(inner, "attr", getattr(inner, "id", ""))) for inner in ast.walk(node))
    nested = any(isinstance(inner, ast.Call) and inner is not node and _looks(inner) for inner in ast.walk(node))
    if looks and not undone and not nested:
        frame.report.add("LP205", node, f"{ast.unparse(node)} looks at scaled gradients")


def _looks(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr in _CHECKS


_BINARY = "binary_cross_entropy"


def check_cast(node: ast.Call, cast: str, frame: Frame) -> None:
    """LP101: weights that learn are kept in 16 bits although autocast or a GradScaler is there."""
    definitions = frame.report.definitions
    assert isinstance(node.func, ast.Attribute)
    model = node.func.value
    learns = cast == FLOAT16 and definitions.trains and definitions.mixes_precision and definitions.is_model(model)
    if learns and not _is_evaluated(model, frame):
        frame.report.add("LP101", node, f"{ast.unparse(node)}: the weights of a model that is trained")


def _is_evaluated(model: ast.expr, frame: Frame) -> bool:
    """Whether the function that casts it also calls its `eval()`."""
    around = frame.stack[-1] if frame.stack else frame.report.source.tree
    known = frame.report.evaluated
    if id(around) not in known:
        calls = (node.func for node in ast.walk(around) if isinstance(node, ast.Call))
        funcs = [func for func in calls if isinstance(func, ast.Attribute) and func.attr == "eval"]
        known[id(around)] = {ast.unparse(func.value) for func in funcs}
    return ast.unparse(model) in known[id(around)]


def check_operation(node: ast.Call, operation: str, inputs: list[Value], frame: Frame) -> Value:
    """LP102 to LP105, and the precision of what comes out."""
    asked = next((read_dtype(word.value) for word in node.keywords if word.arg == "dtype"), None)
    if asked is not None:
        return Value(asked)
    if operation == _BINARY:
        _check_binary(node, inputs, frame)
    result = _result(operation, inputs, frame)
    if any(word.arg == "dtype" for word in node.keywords):
        return UNKNOWN  # in a type that a variable says
    if operation in LOSSES and not frame.region.enabled and any(value.is_low for value in inputs):
        kind = next(value.precision for value in inputs if value.is_low)
        severity = WARNING if kind == BFLOAT16 else None
        frame.report.add("LP102", node, f"{operation} outside autocast, of {_words(kind)} values", severity)
    elif operation in SOFTMAXES and result.is_low:
        frame.report.add("LP103", node, f"{operation} in {_words(result.precision)}{_place(frame)}, without dtype")
    elif operation in REDUCTIONS and result.is_low:
        frame.report.add("LP105", node, f"{operation} in {_words(result.precision)}{_place(frame)}")
    return result


def _check_binary(node: ast.Call, inputs: list[Value], frame: Frame) -> None:
    if not frame.region.enabled:
        return
    fate = frame.fate(_BINARY)
    if fate == "refused" and frame.region.certain:
        frame.report.add("LP104", node, f"{_BINARY} under autocast raises on {frame.device}")
    elif fate != "refused" and any(value.is_low for value in inputs):
        frame.report.add("LP104", node, f"{_BINARY} under autocast, of probabilities in 16 bits", WARNING)


def _result(operation: str, inputs: list[Value], frame: Frame) -> Value:
    """Products come out in autocast's type, what it promotes in float32, all else in the type of its inputs."""
    fate = frame.fate(operation)
    if fate == "float32":
        return Value("float32")
    if operation in PRODUCTS and fate == "lowered":
        return Value(frame.region.dtype) if frame.region.certain else UNKNOWN
    known = inputs[:2] if operation in LOSSES else inputs[:1]
    return Value(mix(known).precision) if known else UNKNOWN


def _words(precision: str | None) -> str:
    return "16-bit" if precision == "low" else str(precision)


def _place(frame: Frame) -> str:
    return f" under autocast on {frame.device}" if frame.region.enabled else ""


def note_region(state: State, frame: Frame) -> None:
    """A forward pass in float16 asks for loss scaling (LP302)."""
    region = frame.region
    state.float16_forward |= region.enabled and region.certain and region.dtype == FLOAT16
