"""The rules on gradients, casts, losses and reductions: a table, and the functions that apply them."""

import ast
from dataclasses import dataclass

from instruments.static_check.autocast import (
    BFLOAT16,
    FLOAT16,
    LOSSES,
    PRODUCTS,
    REDUCTIONS,
    SOFTMAXES,
    called_name,
    last_word,
    read_dtype,
    text_of,
)
from instruments.static_check.source import SEVERE, WARNING, Finding
from instruments.static_check.state import UNKNOWN, Frame, State, Value, mix


@dataclass(frozen=True)
class Rule:
    """One rule; the message is completed where it applies."""

    severity: str
    why: str
    fix: str


RULES = {
    "LP101": Rule(SEVERE,
        "updates smaller than half a unit in the last place of a 16-bit weight are lost, and GradScaler refuses to "
        "unscale float16 gradients",
        "keep the weights in float32 and let autocast choose: drop the cast"),
    "LP102": Rule(SEVERE,
        "the loss is computed in the model's 16-bit output: float16 overflows at 65504, which ends in inf or NaN; "
        "bfloat16 keeps 8 bits",
        "compute the loss inside the autocast block, or of logits.float()"),
    "LP103": Rule(WARNING,
        "small probabilities are rounded to 8 (bfloat16) or 11 (float16) bits or flushed to zero, and their sum is no "
        "longer 1; autocast does not promote it here",
        "pass dtype=torch.float32"),
    "LP104": Rule(SEVERE,
        "a probability next to 1 rounds to 1 in 16 bits and its logarithm is lost; where autocast knows it, it raises",
        "use binary_cross_entropy_with_logits (BCEWithLogitsLoss) on the logits, without the sigmoid"),
    "LP105": Rule(WARNING,
        "the result is rounded to 16 bits (bfloat16 keeps 8 of them), and in float16 a sum above 65504 is inf",
        "reduce in float32: dtype=torch.float32 where the function takes it, else .float() before it"),
    "LP201": Rule(SEVERE,
        "gradients are still multiplied by the loss scale, so that the bound is as much too small",
        "call scaler.unscale_(optimizer) before clipping"),
    "LP202": Rule(SEVERE,
        "the loss scale never adapts, and the next unscale_ of this optimizer raises",
        "call scaler.update() once, after all optimizers' scaler.step()"),
    "LP203": Rule(SEVERE,
        "the second call raises: gradients would be divided by the scale twice",
        "call unscale_ once for each optimizer between two scaler.update()"),
    "LP204": Rule(SEVERE,
        "the optimizer takes gradients that are multiplied by the loss scale, inf and NaN included",
        "call scaler.step(optimizer), then scaler.update()"),
    "LP205": Rule(WARNING,
        "what is measured is the gradient times the loss scale, and overflows that GradScaler is there to skip",
        "call scaler.unscale_(optimizer) first"),
    "LP301": Rule(WARNING,
        "backward ops already run in the types that autocast chose forward; under autocast, those written in Python "
        "are cast once more",
        "end the autocast block after the loss is computed"),
    "LP302": Rule(WARNING,
        "float16 gradients below 6e-8 are zero without loss scaling",
        "scale the loss with torch.amp.GradScaler, or use dtype=torch.bfloat16"),
}  # fmt: skip


def report(frame: Frame, code: str, node: ast.expr, message: str, severity: str | None = None) -> None:
    """Note a finding, unless a comment asks for silence."""
    rule, source = RULES[code], frame.report.source
    if not source.is_silenced(code, node):
        place = (source.path, node.lineno, node.col_offset)
        frame.report.findings.add(Finding(*place, code, message, severity or rule.severity, rule.why, rule.fix))


_CLIPS = {"clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "clip_grads_with_norm_", "get_total_norm"}
_CHECKS = {"norm", "isnan", "isinf", "isfinite", "vector_norm", "abs", "max", "mean", "sum", "std", "any", "all"}
# They unscale by themselves.
_MANAGERS = {"accelerator", "fabric", "self", "trainer", "engine"}


def check_gradients(node: ast.Call, arguments: list[Value], state: State, frame: Frame) -> Value | None:
    """What a call does to gradients and their scale; None where it has nothing to do with them."""
    _check_look(node, state, frame)
    word, func = called_name(node), node.func
    owner = func.value if isinstance(func, ast.Attribute) else None
    if word in _CLIPS:
        if state.gradients_scaled and (owner is None or last_word(text_of(owner)) not in _MANAGERS):
            report(frame, "LP201", node, f"{ast.unparse(func)}() of scaled gradients")
        return UNKNOWN
    if owner is None:
        return None
    if word in {"backward", "manual_backward"}:
        return _backward(node, owner, arguments, state, frame)
    if frame.definitions.is_scaler(owner):
        return _scaler(node, word, owner, state, frame)
    if word == "step" and frame.definitions.is_optimizer(owner):
        if state.gradients_scaled:
            report(frame, "LP204", node, f"{ast.unparse(func)}() after the backward pass of a scaled loss")
        return UNKNOWN
    return None


def _backward(node: ast.Call, loss: ast.expr, arguments: list[Value], state: State, frame: Frame) -> Value:
    owner = last_word(text_of(loss))
    if frame.region.enabled and owner not in {"super", "ctx"}:
        report(frame, "LP301", node, f"{ast.unparse(node.func)}() inside an autocast block")
    if _is_scaled(loss, state, frame) or any(value.scaled for value in arguments):
        state.forget_scale()
        state.scaled = True
    elif owner not in _MANAGERS:
        state.forget_scale()
        if state.float16_forward and not frame.definitions.scales:
            report(frame, "LP302", node, "backward of a loss from float16 autocast, without loss scaling")
    return UNKNOWN


def _is_scaled(node: ast.expr, state: State, frame: Frame) -> bool:
    """`scaler.scale(loss)`, or a name that was bound to it."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "scale":
        return frame.definitions.is_scaler(node.func.value)
    return state.values.get(text_of(node), UNKNOWN).scaled


def _scaler(node: ast.Call, word: str, scaler: ast.expr, state: State, frame: Frame) -> Value | None:
    optimizer = {ast.unparse(node.args[0]) if node.args else ""}
    if word == "scale":
        return Value(scaled=True)
    if word == "unscale_":
        if optimizer <= state.surely_unscaled:
            report(frame, "LP203", node, f"{ast.unparse(node)} a second time before scaler.update()")
        state.unscaled |= optimizer
        state.surely_unscaled |= optimizer
    elif word == "step":
        if not frame.definitions.updates(scaler):
            report(frame, "LP202", node, f"{ast.unparse(node)} without {ast.unparse(scaler)}.update()")
        state.surely_unscaled -= optimizer
    elif word == "update":
        state.forget_scale()
    else:
        return None
    return UNKNOWN


def _check_look(node: ast.Call, state: State, frame: Frame) -> None:
    """LP205: `p.grad.norm()`, `torch.isnan(p.grad)`, before unscaling."""
    if not state.gradients_scaled or not _looks(node):
        return
    inside = list(ast.walk(node))
    given = [inner for part in [node.func, *node.args] for inner in ast.walk(part)]
    looks = any(isinstance(inner, ast.Attribute) and inner.attr == "grad" for inner in given)
    undone = any("scale" in str(getattr(inner, "attr", getattr(inner, "id", ""))) for inner in inside)
    if looks and not undone and not any(inner is not node and _looks(inner) for inner in inside):
        report(frame, "LP205", node, f"{ast.unparse(node)} looks at scaled gradients")


def _looks(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHECKS


_BINARY = "binary_cross_entropy"


def check_cast(node: ast.Call, cast: str, frame: Frame) -> None:
    """LP101: weights that learn are kept in 16 bits although autocast or a GradScaler is there."""
    definitions = frame.definitions
    assert isinstance(node.func, ast.Attribute)
    model, mixed = node.func.value, definitions.scales or definitions.autocasts
    learns = cast == FLOAT16 and definitions.trains and mixed and definitions.is_model(model)
    if learns and not _is_evaluated(model, frame):
        report(frame, "LP101", node, f"{ast.unparse(node)}: the weights of a model that is trained")


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
    dtypes = [read_dtype(word.value) for word in node.keywords if word.arg == "dtype"]
    if dtypes and dtypes[0] is not None:
        return Value(dtypes[0])
    if operation == _BINARY and frame.region.enabled:
        _check_binary(node, inputs, frame)
    result = _result(operation, inputs, frame)
    if dtypes:
        return UNKNOWN  # in a type that a variable says
    low = next((value.precision for value in inputs if value.is_low), None)
    place = f" under autocast on {frame.device}" if frame.region.enabled else ""
    if operation in LOSSES and low and not frame.region.enabled:
        severity = WARNING if low == BFLOAT16 else None
        report(frame, "LP102", node, f"{operation} outside autocast, of {_words(low)} values", severity)
    elif operation in SOFTMAXES and result.is_low:
        report(frame, "LP103", node, f"{operation} in {_words(result.precision)}{place}, without dtype")
    elif operation in REDUCTIONS and result.is_low:
        report(frame, "LP105", node, f"{operation} in {_words(result.precision)}{place}")
    return result


def _check_binary(node: ast.Call, inputs: list[Value], frame: Frame) -> None:
    fate = frame.fate(_BINARY)
    if fate == "refused" and frame.region.certain:
        report(frame, "LP104", node, f"{_BINARY} under autocast raises on {frame.device}")
    elif fate != "refused" and any(value.is_low for value in inputs):
        report(frame, "LP104", node, f"{_BINARY} under autocast, of probabilities in 16 bits", WARNING)


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
