"""Rules on precision: casts of models, losses, softmaxes and reductions."""

import ast

from models.numerics.static.frame import Frame
from models.numerics.static.operations import LOSSES, PRODUCTS, REDUCTIONS, SOFTMAXES
from models.numerics.static.region import BFLOAT16, FLOAT16, read_dtype
from models.numerics.static.rules import WARNING
from models.numerics.static.state import UNKNOWN, State, Value, mix

_BINARY = "binary_cross_entropy"


def check_cast(node: ast.Call, cast: str, frame: Frame) -> None:
    """LP101: weights that learn are kept in 16 bits although autocast or a GradScaler is there."""
    definitions = frame.report.definitions
    assert isinstance(node.func, ast.Attribute)
    if _is_evaluated(node.func.value, frame):
        return
    if cast == FLOAT16 and definitions.trains and definitions.mixes_precision and definitions.is_model(node.func.value):
        frame.report.add("LP101", node, f"{ast.unparse(node)}: the weights of a model that is trained")


def _is_evaluated(model: ast.expr, frame: Frame) -> bool:
    """Whether the function that casts it also calls its `eval()`."""
    around = frame.stack[-1] if frame.stack else frame.report.source.tree
    calls = (node.func for node in ast.walk(around) if isinstance(node, ast.Call))
    evaluated = {ast.unparse(func.value) for func in calls if isinstance(func, ast.Attribute) and func.attr == "eval"}
    return ast.unparse(model) in evaluated


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
