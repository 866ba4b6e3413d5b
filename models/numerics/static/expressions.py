"""The precision of an expression, as far as the file tells."""

import ast

from models.numerics.static.calls import evaluate_call
from models.numerics.static.frame import Frame
from models.numerics.static.names import text_of
from models.numerics.static.state import UNKNOWN, State, Value, mix

# Of a tensor, but no tensors of its precision.
_FACTS = {"shape", "device", "dtype", "grad", "ndim", "itemsize", "config", "loss"}


def evaluate(node: ast.expr, state: State, frame: Frame) -> Value:  # noqa: C901, PLR0911, PLR0912 - a case a kind
    """Its value; everything inside is looked at on the way, once."""
    match node:
        case ast.Call():
            base = evaluate(node.func.value, state, frame) if isinstance(node.func, ast.Attribute) else UNKNOWN
            arguments = [evaluate(part, state, frame) for part in node.args]
            words = [evaluate(word.value, state, frame) for word in node.keywords]
            return evaluate_call(node, base, [*arguments, *words], state, frame)
        case ast.Constant():
            return Value(constant=True)
        case ast.Name():
            return state.values.get(node.id, UNKNOWN)
        case ast.Attribute():
            base = evaluate(node.value, state, frame)
            known = state.values.get(text_of(node) or "")
            return known or (UNKNOWN if node.attr in _FACTS else Value(base.precision))
        case ast.Subscript():
            evaluate(node.slice, state, frame)
            return evaluate(node.value, state, frame)
        case ast.BinOp():
            sides = [evaluate(node.left, state, frame), evaluate(node.right, state, frame)]
            if isinstance(node.op, ast.MatMult) and frame.region.enabled:
                return Value(frame.region.dtype) if frame.region.certain else UNKNOWN
            mixed = mix(sides)
            return Value(mixed.precision, scaled=any(side.scaled for side in sides), constant=mixed.constant)
        case ast.UnaryOp():
            value = evaluate(node.operand, state, frame)
            return UNKNOWN if isinstance(node.op, ast.Not) else value
        case ast.IfExp():
            evaluate(node.test, state, frame)
            ways = [evaluate(node.body, state, frame), evaluate(node.orelse, state, frame)]
            return ways[0] if ways[0] == ways[1] else UNKNOWN
        case ast.NamedExpr():
            value = evaluate(node.value, state, frame)
            state.values[node.target.id] = value
            return value
        case ast.Tuple() | ast.List():
            parts = [evaluate(part, state, frame) for part in node.elts]
            return parts[0] if parts and all(part == parts[0] for part in parts) else UNKNOWN
        case ast.Lambda():
            return UNKNOWN  # it runs elsewhere
        case _:
            for part in ast.iter_child_nodes(node):
                _look_inside(part, state, frame)
            return UNKNOWN


def _look_inside(node: ast.AST, state: State, frame: Frame) -> None:
    if isinstance(node, ast.expr):
        evaluate(node, state, frame)
    else:
        for part in ast.iter_child_nodes(node):
            _look_inside(part, state, frame)
