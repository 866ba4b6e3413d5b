"""What a call does: casts, operations of torch, functions of the file itself."""

import ast

from instruments.static_check.names import dotted_name, last_word, read_dtype, text_of
from instruments.static_check.operations import KNOWN
from instruments.static_check.precision_rules import check_cast, check_gradients, check_operation
from instruments.static_check.state import UNKNOWN, Frame, State, Value, mix

_CASTS = {"half": "float16", "bfloat16": "bfloat16", "float": "float32", "double": "float32"}
_PLACES = ("torch.nn.functional.", "torch.special.", "torch.linalg.", "torch.")
# Modules and builtins whose functions of the same names are not torch's.
_PLAIN = {"sum", "pow", "print", "len", "min", "max", "range", "isinstance", "getattr", "str", "int", "float", "bool"}
_NO_TENSORS = {"item", "tolist", "numpy", "argmax", "argsort", "size", "dim", "numel", "long", "int", "bool", "keys"}


def evaluate_call(node: ast.Call, base: Value, arguments: list[Value], state: State, frame: Frame) -> Value:
    """The value of a call whose parts have been looked at."""
    done = check_gradients(node, arguments, state, frame)
    if done is not None:
        return done
    cast = read_cast(node, frame)
    if cast is not None:
        check_cast(node, cast, frame)
        if (
            isinstance(node.func, ast.Attribute)
            and (text := text_of(node.func.value))
            and frame.report.definitions.is_model(node.func.value)
        ):
            state.values[text] = Value(cast)  # modules are cast in place
        return Value(cast, scaled=base.scaled)
    local = _local_function(node, frame)
    if local is not None:
        return frame.call(frame, state, local[0], local[1], node, arguments)
    operation = find_operation(node, frame)
    if operation is not None:
        method = (
            isinstance(node.func, ast.Attribute) and dotted_name(node.func, frame.report.definitions.imports) is None
        )
        inputs = [base, *arguments] if method and not _is_object(node, frame) else arguments
        return check_operation(node, operation, inputs, frame)
    return _unknown(node, base, arguments, state, frame)


def read_cast(node: ast.Call, frame: Frame) -> str | None:
    """The type that `.half()`, `.to(torch.float16)` and the like cast to."""
    func = node.func
    if not isinstance(func, ast.Attribute) or dotted_name(func, frame.report.definitions.imports):
        return None
    if func.attr in _CASTS and not node.args and not node.keywords:
        return _CASTS[func.attr]
    if func.attr not in {"to", "type"}:
        return None
    given = [*node.args, *(word.value for word in node.keywords if word.arg == "dtype")]
    named = [read_dtype(part) for part in given if not isinstance(part, ast.Constant)]
    return next((dtype for dtype in named if dtype), None)


def find_operation(node: ast.Call, frame: Frame) -> str | None:
    """What torch calls what is called: a function, a method of a tensor, a loss module."""
    definitions = frame.report.definitions
    full = dotted_name(node.func, definitions.imports)
    if full is not None:
        for place in _PLACES:
            name = full.removeprefix(place)
            if full.startswith(place) and name in KNOWN:
                return name
        return None
    loss = definitions.loss_of(text_of(node.func) or "")
    if loss is not None:
        return loss
    if isinstance(node.func, ast.Attribute) and node.func.attr in KNOWN:
        return node.func.attr
    return None


def _is_object(node: ast.Call, frame: Frame) -> bool:
    return frame.report.definitions.loss_of(text_of(node.func) or "") is not None


def _local_function(node: ast.Call, frame: Frame) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef, str | None] | None:
    """The function of this file that is called, and its class."""
    definitions, text = frame.report.definitions, text_of(node.func)
    if text is None:
        return None
    if text in definitions.functions and "." not in text:
        return definitions.functions[text], None
    owner = definitions.class_of(text)
    name = "forward"
    if owner is None:
        head, _dot, name = text.rpartition(".")
        owner = frame.class_name if head == "self" else definitions.class_of(head)
    found = definitions.method(owner, name) if owner and name else None
    return (found, owner) if found is not None else None


def _unknown(node: ast.Call, base: Value, arguments: list[Value], state: State, frame: Frame) -> Value:
    """Under autocast, what others compute comes out in 16 bits; elsewhere methods keep the type of their tensor."""
    callee = text_of(node.func)
    word = last_word(callee) or (node.func.attr if isinstance(node.func, ast.Attribute) else "")
    if word in _NO_TENSORS or word in _PLAIN or "loss" in word.lower() or "criterion" in word.lower():
        return UNKNOWN
    cast = state.values.get(callee or "")
    if cast is not None and cast.is_low and not frame.region.enabled:
        return Value(cast.precision)  # a module whose weights were cast
    if frame.region.enabled and frame.region.certain and frame.report.definitions.is_model(node.func):
        return Value(frame.region.dtype)
    if base.precision is not None and isinstance(node.func, ast.Attribute):
        return Value(base.precision)
    if dotted_name(node.func, frame.report.definitions.imports) and not node.keywords:
        mixed = mix(arguments)
        return Value(mixed.precision) if len(arguments) == 1 else UNKNOWN
    return UNKNOWN


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
