"""Rules on values in 16 bits and on formulas that lose digits."""

import ast
import re
from contextlib import suppress

from instruments.static_check.autocast import BFLOAT16, FLOAT16, FLOAT32, LOSSES, NORMS, PRODUCTS, REDUCTIONS, SOFTMAXES
from instruments.static_check.source import NOTE, WARNING
from instruments.static_check.state import LOWS, OFF, UNKNOWN, Call, Frame, Value, mix

LARGEST, SMALLEST = 65520.0, 2.0**-25  # float16: at least the first is inf, at most the second is zero
_SAFE = {"shifted", "negative"}  # tags of values whose exp does not overflow
# Operations that keep the tag: they return the same values or some of them.
KEEPING = {
    "diag", "diagonal", "detach", "cuda", "cpu", "gather", "squeeze", "unsqueeze", "view", "reshape", "float", "to",
    "contiguous", "flatten", "clone", "t",
}  # fmt: skip

CRITERION = re.compile(r"crit(?:erion)?(?:_\w+)?|loss_(?:fn|func|function)")


def check_operation(
    node: ast.Call, operation: str, inputs: list[Value], words: dict[str, Value], frame: Frame
) -> Value:
    """Apply LP102, LP103, LP105, LP106 and LP108 to an operation; returns its result."""
    tag = _tag(operation, inputs, node)
    asked = words.get("dtype")
    if asked is not None and asked.precision is not None:
        return Value(asked.precision, origin="cast", tag=tag)
    _check_formula(node, operation, inputs, frame)
    if operation in PRODUCTS and operation != "linear":
        _check_angles(node, node.args, frame)
    result = _result(operation, inputs, frame)
    if asked is not None:
        return Value(tag=tag)  # dtype is a variable
    low = next((value for value in inputs if value.is_low), None)
    where = f" under autocast on {frame.device}" if frame.region.enabled else ""
    if frame.no_grad:
        pass  # no training
    elif operation in LOSSES and low and not frame.region.enabled:
        severity = WARNING if low.precision == BFLOAT16 else None
        frame.report("LP102", node, f"{operation} outside autocast, of {_words(low.precision)} values", severity)
    elif operation in SOFTMAXES and result.is_low:
        frame.report("LP103", node, f"{operation} in {_words(result.precision)}{where}, without dtype")
    elif operation in REDUCTIONS and result.is_low and (operation != "mean" or result.origin == "cast"):
        severity = NOTE if operation == "mean" else None  # torch sums in float32 here, and rounds once
        frame.report("LP105", node, f"{operation} in {_words(result.precision)}{where}", severity)
    elif operation in NORMS and result.is_low and result.origin == "cast" and not frame.region.enabled:
        frame.report("LP106", node, f"{operation} in {_words(result.precision)}", NOTE)
    return Value(result.precision, result.origin, tag)


def _result(operation: str, inputs: list[Value], frame: Frame) -> Value:
    """Result type: autocast's for products, float32 if autocast promotes the operation, else that of the inputs."""
    fate = frame.fate(operation)
    if fate == FLOAT32:
        return Value(FLOAT32)
    if operation in PRODUCTS and fate == "lowered":
        return Value(frame.region.dtype, "autocast") if frame.region.certain else UNKNOWN
    known = inputs[:2] if operation in LOSSES else inputs if operation in PRODUCTS else inputs[:1]
    return mix([value for value in known if not value.is_constant]) if known else UNKNOWN


def _words(precision: str | None) -> str:
    return "16-bit" if precision == "low" else str(precision)


def _tag(operation: str, inputs: list[Value], node: ast.Call) -> str:
    """Tag of the result, for rules on formulas."""
    of = inputs[0].tag if inputs else ""
    if any(word.arg == "axis" for word in node.keywords):
        return ""  # NumPy
    if operation == "square" or (operation == "pow" and len(inputs) > 1 and inputs[1].constant == 2):
        return square_of(of)
    if operation in PRODUCTS:
        return "positions" if any(value.tag == "positions" for value in inputs) else ""
    kept = {"softmax": "softmax", "sigmoid": "sigmoid", "max": "max", "amax": "max", "sum": "sum", "mean": "mean"}
    changed = {("sum", "exp"): "sum_exp", ("sum", "square"): "sum_square", ("mean", "square"): "mean_square"}
    safe = {"exp": "" if of in _SAFE else "exp"}
    return changed.get((operation, of)) or (kept | safe).get(operation, "")


def square_of(tag: str) -> str:
    """Tag of the square of a value with this tag."""
    return "square_mean" if tag == "mean" else "square"


_STABLE = {
    ("log", "softmax"): "log_softmax", ("log", "sigmoid"): "logsigmoid", ("log", "sum_exp"): "logsumexp",
    ("log", "one_plus_exp"): "softplus", ("log1p", "exp"): "softplus",
}  # fmt: skip


def _check_formula(node: ast.Call, operation: str, inputs: list[Value], frame: Frame) -> None:
    """LP108: a logarithm for which there is a stable function, and exp in float16."""
    of = inputs[0] if inputs else UNKNOWN
    severity, fate = frame.grade(of.precision), frame.fate(operation)
    if severity == NOTE and of.precision == FLOAT32:
        return
    tag = of.tag.removesuffix("+eps")
    if stable := _STABLE.get((operation, tag)):
        if severity != NOTE or (operation == "log" and tag == of.tag):
            message = f"{ast.unparse(node)}: {operation} of {tag}, for which there is {stable}"
            frame.report("LP108", node, message, severity)
    elif operation == "exp" and fate == "kept" and of.precision == FLOAT16 and not (of.tag in _SAFE or frame.no_grad):
        frame.report("LP108", node, f"{ast.unparse(node)} in float16: inf above 11")


def combine(node: ast.BinOp, left: Value, right: Value, frame: Frame) -> Value:
    """Value of an arithmetic expression; applies LP107 to LP109."""
    if isinstance(node.op, ast.Mult | ast.Div | ast.Pow):  # unknown operands may be numbers by their names
        left, right = (_as_number(part, value) for part, value in ((node.left, left), (node.right, right)))
    mixed = mix([left, right])
    if left.is_constant and right.is_constant:
        return _fold(node, left, right)
    if isinstance(node.op, ast.MatMult):
        _check_angles(node, [node.left, node.right], frame)
    if isinstance(node.op, ast.MatMult) and frame.region.enabled:
        return Value(frame.region.dtype, "autocast") if frame.region.certain else UNKNOWN
    for value, other in ((left, right), (right, left)):
        if isinstance(node.op, ast.Mult):
            check_constant(node, other.number if value.tag == "complement" else None, value, frame)  # a mask
        elif isinstance(node.op, ast.Add | ast.Sub):
            check_constant(node, value.number, mixed, frame)
            check_constant(node, float(value.tag[6:]) if value.tag.startswith("times ") else None, other, frame)
    tag = _combined_tag(node, left, right)
    worse = next((value.precision for value in (left, right) if value.is_low), mixed.precision)
    if tag == "difference":
        frame.report("LP109", node, f"{ast.unparse(node)}: variance as E[x²] − E[x]²", frame.grade(worse))
    if tag == "ratio" and FLOAT32 not in {left.precision, right.precision}:
        message = f"{ast.unparse(node)}: softmax without subtracting the maximum"
        frame.report("LP108", node, message, frame.grade(worse))
    keeps = isinstance(node.op, ast.Mult | ast.Div) and (left.is_constant or right.is_constant)
    origin = (mixed.origin or left.origin or right.origin) if mixed.is_low else ""
    return Value(mixed.precision, origin, tag, left.scaled or right.scaled, cast=left.cast if keeps else None)


_NUMBERS = re.compile(
    r"scal|temp|tau|sqrt|dim|d_?k\b|eps|size|gamma|beta|alpha|decay|count|len|num|\bn_|shape\[[^]]+\]$"
)


def _as_number(node: ast.expr, value: Value) -> Value:
    unknown = value in (UNKNOWN, Value(tag="negative"))
    return Value(constant="?", tag=value.tag) if unknown and _NUMBERS.search(ast.unparse(node).lower()) else value


def _fold(node: ast.BinOp, left: Value, right: Value) -> Value:
    first, second = left.number, right.number
    if first is not None and second is not None:
        with suppress(OverflowError, ZeroDivisionError):
            match node.op:
                case ast.Mult():
                    return Value(constant=first * second)
                case ast.Div():
                    return Value(constant=first / second)
                case ast.Pow() if first > 0 and abs(second) <= 64:
                    return Value(constant=float(first) ** second)
    return Value(constant="?")


_HELD = {"sum_square", "sum", "softmax", "sigmoid", "sum_exp", "positions"}


def _combined_tag(node: ast.BinOp, left: Value, right: Value) -> str:  # noqa: C901, PLR0911, PLR0912 - a case a kind
    pair, numbers = (left.tag, right.tag), (left.number or 0, right.number or 0)
    match node.op:
        case ast.Pow() if right.constant == 2:
            return square_of(left.tag)
        case ast.Mult() if ast.dump(node.left) == ast.dump(node.right):
            return square_of(left.tag)
        case ast.Mult() if huge := [number for number in numbers if LARGEST <= abs(number) < float("inf")]:
            return f"times {huge[0]}"
        case ast.Mult() if "negative" in pair or any(number < 0 for number in numbers):
            return "negative"
        case ast.Mult() | ast.MatMult():
            return next((tag for tag in pair if tag in {"exp", "positions"}), "")
        case ast.Sub() if pair == ("mean_square", "square_mean"):
            return "difference"
        case ast.Sub() if left.tag == "sum_exp":
            return "sum_exp"
        case ast.Sub() if right.tag == "max":
            return "shifted"
        case ast.Sub() if left.constant == 1:
            return "sigmoid" if right.tag == "sigmoid" else "complement"
        case ast.Add() if 1 in {left.constant, right.constant} and "exp" in pair:
            return "one_plus_exp"
        case ast.Add():
            held = next((tag for tag in pair if tag in _HELD), "")
            if held in {"sum_square", "sum", "positions", ""}:
                return held
            return f"{held}+eps" if left.is_constant or right.is_constant else ""
        case ast.Div() if pair == ("exp", "sum_exp"):
            return "ratio"
        case ast.Div():
            means = {"sum_square": "mean_square", "sum": "mean"}
            return means.get(left.tag, left.tag if left.tag in _SAFE else "")
    return ""


def check_constant(node: ast.expr, constant: float | None, value: Value, frame: Frame) -> None:
    """LP107: a constant used with a float16 value, outside float16's range; None: no constant."""
    size = abs(constant or 0.0)
    if value.precision != FLOAT16 or size in {0.0, float("inf")} or SMALLEST < size < LARGEST:
        return
    becomes = "zero" if size <= SMALLEST else "out of range"
    frame.report("LP107", node, f"{ast.unparse(node)}: {constant:g} is {becomes} in float16")


def read_positions(call: Call) -> Value:
    """Value of an arange that 16 bits round, and of products with one."""
    counts = [value.number for value in call.arguments]
    short = all(count is not None and count <= 257 for count in counts)  # bfloat16 holds 256
    made = call.word == "arange" and not short
    parts = [part for value in call.every for part in (value.ref if isinstance(value.ref, tuple) else (value,))]
    return Value(tag="positions" if made or any(part.tag == "positions" for part in parts) else "")


def check_positions(node: ast.expr, value: Value, precision: str, frame: Frame) -> None:
    """LP110: positions, or angles computed from them, in 16 bits."""
    if value.tag == "positions" and precision in LOWS:
        frame.report("LP110", node, f"{ast.unparse(node)}: positions in {_words(precision)}")


_ANGLES = re.compile(r"inv_?freq|position_ids")


def _check_angles(node: ast.expr, factors: list[ast.expr], frame: Frame) -> None:
    """LP110: the angles of a rotary embedding by a product, which autocast runs in 16 bits, here or around a call."""
    made_once = any(function.name == "__init__" for function in frame.stack)
    where = "autocast" if frame.region.enabled else "a caller's autocast"
    if not frame.region.enabled and (frame.region is not OFF or made_once or not frame.stack):
        return
    if any(_ANGLES.search(ast.unparse(factor)) for factor in factors):
        severity = None if frame.region.enabled else NOTE
        frame.report("LP110", node, f"{ast.unparse(node)}: angles in 16 bits under {where}", severity)


def check_growing(node: ast.expr, value: Value, frame: Frame) -> None:
    """LP105: a running sum or average in 16 bits."""
    if value.precision in LOWS:
        frame.report("LP105", node, f"{ast.unparse(node)} accumulates in {_words(value.precision)}")


_BOUNDS = {
    "masked_fill", "masked_fill_", "clamp", "clip", "clamp_min", "clamp_", "where", "new_full", "full_like", "fill_",
    "new_tensor",
}  # fmt: skip


def check_names(call: Call, frame: Frame) -> None:
    """LP102 of a criterion, LP105 of a running average, LP107 of a bound, all known by the name of the function."""
    node, word, base, every = call.node, call.word, call.base, call.every
    low = next((value for value in every if value.is_low), None)
    if CRITERION.fullmatch(word) and low and low.origin == "autocast" and not (frame.region.enabled or frame.no_grad):
        severity = None if low.precision == FLOAT16 else WARNING
        frame.report("LP102", node, f"{word} outside autocast, of {low.precision} values", severity)
    if word in {"mul_", "lerp_"} and base.kind == "parameter" and _averages(call):
        check_growing(node, base, frame)
    if word in _BOUNDS and "dtype" not in call.words:
        tensor = base if base.is_low else low or base
        for value in every:
            check_constant(node, value.number, tensor, frame)


def _averages(call: Call) -> bool:
    """Whether the call multiplies by a decay close to 1."""
    numbers = [value.constant for value in call.every if isinstance(value.constant, float)]
    words = " ".join(ast.unparse(part) for part in call.node.args)
    most = 0.1 if call.word == "lerp_" else 0.0
    decays = any(0.9 <= abs(number) < 1 or 0 < number <= most for number in numbers)
    return decays or bool(re.search(r"decay|ema|momentum|beta", words, re.IGNORECASE))
