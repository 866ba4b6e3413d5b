"""Rules on gradients: GradScaler's calls in their order, and backward passes under autocast."""

import ast

from models.numerics.static.frame import Frame
from models.numerics.static.names import last_word, text_of
from models.numerics.static.state import UNKNOWN, State, Value

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
