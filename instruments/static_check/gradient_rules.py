"""Rules on gradients and their scale: GradScaler, accelerate, Lightning."""

import ast
import re
from dataclasses import replace

from instruments.static_check.autocast import BFLOAT16, FLOAT16, FLOAT32, last_word, text_of
from instruments.static_check.modules import check_trained
from instruments.static_check.source import NOTE, SEVERE, WARNING
from instruments.static_check.state import UNKNOWN, Call, Frame, State, Value

_CLIPS = {"clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "clip_grads_with_norm_", "get_total_norm"}
_CHECKS = {"norm", "isnan", "isinf", "isfinite", "vector_norm", "abs", "max", "mean", "sum", "std", "any", "all"}
# Objects that scale and unscale by themselves.
_MANAGERS = {"accelerator", "fabric", "self", "trainer", "engine", "strategy", "amp", "scaler", "super", "ctx"}
# Methods of an Accelerator or Fabric; without any of them it only knows the device.
_MANAGING = {"prepare", "prepare_model", "setup", "setup_module", "backward"}
_OPTIMIZER = re.compile(r"optim|(?:^|_)opt(?:$|_|[A-Z0-9])|^opt[a-z]?$")
_SCALING = {
    "scale", "unscale_", "step", "update", "backward", "clip_grad_norm_", "clip_grad_value_", "manual_backward",
}  # fmt: skip
# Conditions that mean "mixed precision is on" have many names; as facts they have one.
_MIXED = re.compile(r"scaler|\bamp\b|_amp|fp16|mixed|autocast|\bhalf\b", re.IGNORECASE)
_MIXED_FACT = "mixed precision"
_SCALED = re.compile(rf"{_MIXED_FACT}|scal|precision", re.IGNORECASE)


def is_optimizer(node: ast.expr, value: Value) -> bool:
    """Whether it is an optimizer, by its value or else by its name."""
    word = last_word(text_of(node))
    named = not value.kind and "sched" not in word.lower() and bool(_OPTIMIZER.search(word))
    return value.kind == "optimizer" or named


def check_gradients(call: Call, state: State, frame: Frame) -> Value | None:
    """Apply the effect of a call on gradients and their scale; None if it has none."""
    node, word, base = call.node, call.word, call.base
    _check_look(node, state, frame)
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    if word in _CLIPS:
        _clip(node, owner, base, state, frame)
        return UNKNOWN
    if owner is None:
        return None
    if word == "step":
        state.backed, state.clipped = False, None
    if word == "unscale_gradients":
        state.unscaled |= {"accelerate"}
    if word in {"backward", "manual_backward"}:
        _backward(call, owner, state, frame)
        return UNKNOWN
    if base.kind == "scaler" or (not base.kind and frame.definitions.is_scaler_name(text_of(owner))):
        return _scaler(call, state, frame)
    if word == "step" and is_optimizer(owner, base):
        _step(node, ast.unparse(owner), base, state, frame)
        return UNKNOWN
    return None


def _step(node: ast.Call, optimizer: str, value: Value, state: State, frame: Frame) -> None:
    call = ast.unparse(node)
    if state.gradients_scaled and optimizer not in state.done:
        frame.report("LP204", node, f"{call} after the backward pass of a scaled loss")
    elif optimizer in state.surely_unscaled:
        frame.report("LP204", node, f"{call} although GradScaler has unscaled the gradients and counted inf and NaN")
    elif optimizer in state.done:
        frame.report("LP204", node, f"{call} after scaler.step({optimizer}): a second step of the same gradients")
    check_trained(value, state, frame)


def _clip(node: ast.Call, owner: ast.expr | None, base: Value, state: State, frame: Frame) -> None:
    state.clipped = None if state.backed else node
    text, full = text_of(owner), frame.definitions.full_name(node.func)
    mine = owner is not None and last_word(text) in _MANAGERS
    of_torch = owner is None or "torch" in full or last_word(text) in {"utils", "clip_grad"}
    if mine or not (of_torch or base.kind == "module" or last_word(text) == "model"):
        return  # a method of an optimizer or a library, which knows the scale
    if state.gradients_scaled:
        frame.report("LP201", node, f"{ast.unparse(node.func)}() of scaled gradients")
    elif of_torch and not state.unscaled:
        _check_manager(node, state, frame)


def _backward(call: Call, loss: ast.expr, state: State, frame: Frame) -> None:
    node, base, owner = call.node, call.base, last_word(text_of(loss))
    if state.clipped is not None:
        frame.report("LP207", state.clipped, f"{ast.unparse(state.clipped)} before {ast.unparse(node)}")
    state.backed, state.clipped = True, None
    outer = owner in _MANAGERS or base.kind in {"accelerator", "optimizer", "module"} or is_optimizer(loss, base)
    if frame.region.enabled and not outer and not frame.is_lightning:
        frame.report("LP301", node, f"{ast.unparse(node.func)}() inside an autocast block")
    state.done = frozenset()
    scales = any(isinstance(part, ast.Attribute) and "scale" in part.attr for part in ast.walk(loss))
    if scales or any(value.scaled for value in [base, *call.every]):
        # The scaler's state of each optimizer stays until update().
        state.scaled, state.plain, state.unscaled = True, False, frozenset()
    elif not outer:
        state.forget_scale()
        # Not in the else branch of `if use_amp: scaler.scale(loss).backward()`.
        state.plain = not any(_SCALED.search(fact) and not met for fact, met in state.facts.items())
        managed = frame.definitions.scales or frame.definitions.policies or frame.definitions.has_masters
        if FLOAT16 in state.forward and not managed:
            frame.report("LP302", node, "backward of a loss from float16 autocast, without loss scaling")


def _check_manager(node: ast.Call, state: State, frame: Frame) -> None:
    """LP401, LP402: clipping by hand where accelerate or Lightning has its own."""
    if frame.is_lightning:
        policy = frame.definitions.policy("lightning")
        here = frame.stack[0].name if frame.stack else ""
        unscaled = here in {"configure_gradient_clipping", "on_before_optimizer_step", "optimizer_step"}
        asked = policy.precision if policy else None
        if asked not in {FLOAT32, BFLOAT16} and not unscaled:
            severity = SEVERE if asked == FLOAT16 else NOTE
            frame.report("LP402", node, f"{ast.unparse(node.func)}() in a LightningModule", severity)
        return
    names = [last_word(text) for text, value in state.values.items() if value.kind == "accelerator"]
    managed = any(_MANAGING & frame.definitions.called.get(name, set()) for name in names)
    decided = any(re.search(r"accelerat\w*(?!.*(?:sync|version))", fact, re.IGNORECASE) for fact in state.facts)
    policy = frame.definitions.policy("accelerate")
    if not managed or decided or policy is None:
        return
    asked = policy.precision
    given = any(word.arg in {"mixed_precision", "precision"} for word in policy.node.keywords)
    if asked == BFLOAT16 or (asked == FLOAT32 and given):
        return
    severity = SEVERE if asked == FLOAT16 else WARNING if asked is None else NOTE
    frame.report("LP401", node, f"{ast.unparse(node.func)}() in the loop of an Accelerator or Fabric", severity)


def _scaler(call: Call, state: State, frame: Frame) -> Value | None:
    node, given = call.node, call.every[0] if call.every else UNKNOWN
    optimizer = {ast.unparse(node.args[0]) if node.args else ""}
    if call.word == "scale":
        return replace(given, scaled=True, tag="")
    if call.word == "unscale_":
        state.unscaled |= optimizer
        state.surely_unscaled |= optimizer
    elif call.word == "step":
        if state.plain and not state.scaled and node.args:
            frame.report("LP206", node, f"{ast.unparse(node)} after the backward pass of a loss that was not scaled")
        state.surely_unscaled -= optimizer
        state.done |= optimizer
        check_trained(given, state, frame)
    elif call.word == "update":
        state.forget_scale()
        state.plain = False
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
        frame.report("LP205", node, f"{ast.unparse(node)} looks at scaled gradients")


def _looks(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHECKS


def read_condition(test: ast.expr, way: State) -> tuple[str, bool]:
    """Text of a condition without `not` and `is None`, and whether the body runs if it is true."""
    positive = True
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, positive = test.operand, not positive
    held = way.values.get(text_of(test), UNKNOWN)  # a variable may hold a condition
    if held.tag == "condition" and isinstance(held.ref, ast.expr) and not _MIXED.search(text_of(test)):
        test = held.ref
    if isinstance(test, ast.Compare) and isinstance(test.comparators[0], ast.Constant):
        operator, constant = test.ops[0], test.comparators[0].value
        if (constant is None or constant is False) and isinstance(operator, ast.Is | ast.Eq):
            test, positive = test.left, not positive
        elif (constant is None and isinstance(operator, ast.IsNot)) or constant is True:
            test = test.left
    text = ast.unparse(test)
    return (_MIXED_FACT if _MIXED.search(text) else text), positive


def touches_scaling(statement: ast.stmt, frame: Frame) -> bool:
    """Whether a statement calls a method that scales, unscales or uses gradients."""
    return any(getattr(node, "attr", "") in _SCALING for node in frame.definitions.within(statement))


def depends_on(fact: str, names: set[str]) -> bool:
    """Whether the text of a condition or optimizer contains a call or one of the names."""
    return fact != _MIXED_FACT and bool(re.search(r"\w\(", fact) or names & set(re.findall(r"[A-Za-z_]\w*", fact)))
