"""What a call does: casts, operations of torch, functions of the file itself."""

import ast

from models.numerics.static.frame import Frame
from models.numerics.static.gradient_rules import check_gradients
from models.numerics.static.loss_rules import check_cast, check_operation
from models.numerics.static.names import dotted_name, last_word, text_of
from models.numerics.static.operations import KNOWN
from models.numerics.static.region import read_dtype
from models.numerics.static.state import UNKNOWN, State, Value, mix

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
