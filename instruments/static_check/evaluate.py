"""Evaluate expressions and apply the rules to them."""

import ast
from dataclasses import replace

from instruments.static_check.autocast import DTYPES, last_word, text_of
from instruments.static_check.calls import call_value
from instruments.static_check.numeric_rules import combine
from instruments.static_check.state import UNKNOWN, Call, Frame, State, Value, element_of


def evaluate(node: ast.expr, state: State, frame: Frame) -> Value:  # noqa: C901, PLR0911, PLR0912 - a case a kind
    """Value of an expression; each subexpression is evaluated once, and the rules are applied to it."""
    match node:
        case ast.Call():
            return _call(node, state, frame)
        case ast.Constant(bool()):
            return UNKNOWN
        case ast.Constant(float() | int() | str() as constant):
            return Value(constant=constant)
        case ast.Name():
            return state.values.get(node.id) or _dtype(frame.definitions.full_name(node)) or UNKNOWN
        case ast.Attribute():
            return _attribute(node, evaluate(node.value, state, frame), state, frame)
        case ast.Subscript():
            return _item(evaluate(node.value, state, frame), evaluate(node.slice, state, frame))
        case ast.BinOp():
            return combine(node, evaluate(node.left, state, frame), evaluate(node.right, state, frame), frame)
        case ast.UnaryOp():
            value = evaluate(node.operand, state, frame)
            if not isinstance(node.op, ast.USub):
                return UNKNOWN if isinstance(node.op, ast.Not) else value
            return replace(value, tag="negative") if value.number is None else replace(value, constant=-value.number)
        case ast.IfExp():
            evaluate(node.test, state, frame)
            return _either(evaluate(node.body, state, frame), evaluate(node.orelse, state, frame))
        case ast.Compare() | ast.BoolOp():
            _look_inside(node, state, frame)
            return Value(tag=f"?{ast.unparse(node)}")
        case ast.NamedExpr():
            value = state.values[node.target.id] = evaluate(node.value, state, frame)
            return value
        case ast.Tuple() | ast.List() | ast.Dict() | ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
            return _collection(node, state, frame)
        case ast.Starred():
            return evaluate(node.value, state, frame)
        case ast.Lambda():
            return UNKNOWN  # its body runs at its calls
        case _:
            _look_inside(node, state, frame)
            return UNKNOWN


def _collection(
    node: ast.Tuple | ast.List | ast.Dict | ast.ListComp | ast.GeneratorExp | ast.SetComp, state: State, frame: Frame
) -> Value:
    """Elements of a literal, or the element that a comprehension repeats."""
    if isinstance(node, ast.Tuple | ast.List):
        return Value(kind="parts", ref=tuple(evaluate(part, state, frame) for part in node.elts))
    if isinstance(node, ast.Dict):
        keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
        values = [evaluate(one, state, frame) for one in node.values]
        return Value(kind="dict", ref=tuple(zip(keys, values, strict=True)))
    for generator in node.generators:
        bind(generator.target, element_of(evaluate(generator.iter, state, frame)), state)
        for condition in generator.ifs:
            evaluate(condition, state, frame)
    return evaluate(node.elt, state, frame)


def _look_inside(node: ast.AST, state: State, frame: Frame) -> None:
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.expr):
            evaluate(part, state, frame)
        else:
            _look_inside(part, state, frame)


# Attributes whose values do not have the precision of their object.
_FACTS = {"shape", "device", "grad", "ndim", "itemsize", "config", "loss"}


def _attribute(node: ast.Attribute, base: Value, state: State, frame: Frame) -> Value:  # noqa: PLR0911 - a case a kind
    known = state.values.get(text_of(node)) or _dtype(frame.definitions.full_name(node))
    if known:
        return known
    if node.attr == "dtype":
        return Value(base.precision, kind="dtype")
    if node.attr == "data" and base.kind == "parameter":
        return base
    if node.attr in _FACTS:
        return UNKNOWN
    if base.kind == "module":
        return base if node.attr == "module" else UNKNOWN
    if base.kind:
        return Value(base.precision, base.origin) if base.kind == "parameter" else UNKNOWN
    return Value(base.precision, base.origin, "max" if base.tag == "max" else "")


def _dtype(full: str) -> Value | None:
    """Value of a dtype such as `torch.float16`; None for other names."""
    word = last_word(full)
    return Value(DTYPES[word], kind="dtype") if full == f"torch.{word}" and word in DTYPES else None


def _item(base: Value, index: Value) -> Value:
    if base.kind == "dict" and isinstance(base.ref, tuple):
        known = [value for key, value in base.ref if key == index.constant and index.is_constant]
        every = all(value.kind == "dtype" for _key, value in base.ref)
        return known[0] if known else Value(kind="dtype") if every and base.ref else UNKNOWN
    if base.kind == "parts" and isinstance(base.ref, tuple):
        place = index.constant
        return base.ref[place] if isinstance(place, int) and -len(base.ref) <= place < len(base.ref) else UNKNOWN
    return UNKNOWN if base.is_constant else base


def _either(first: Value, second: Value) -> Value:
    if first == second:
        return first
    for kind in ("region", "module", "scaler", "optimizer"):
        one = next((value for value in (first, second) if value.kind == kind), None)
        if one is not None:
            return one
    return Value(kind="dtype") if first.kind == second.kind == "dtype" else UNKNOWN


def bind(target: ast.expr, value: Value, way: State) -> None:
    """Assign a value to a target; a loss in a model's output does not have the precision of the output."""
    if isinstance(target, ast.Tuple | ast.List):
        parts = value.ref if value.kind in {"parts", "zip"} and isinstance(value.ref, tuple) else ()
        for place, part in enumerate(target.elts):
            bind(part, parts[place] if len(parts) == len(target.elts) else UNKNOWN if parts else value, way)
        return
    text = text_of(target)
    if not text:
        return
    if text in way.owners:
        for name in [name for name in way.values if name.startswith(f"{text}.")]:
            del way.values[name]
    own = value.tag == "output" and "loss" in last_word(text).lower()
    way.values[text] = Value(scaled=value.scaled) if own else value
    names = text.split(".")
    way.owners.update(".".join(names[:end]) for end in range(1, len(names)))


def _call(node: ast.Call, state: State, frame: Frame) -> Value:
    owner = node.func.value if isinstance(node.func, ast.Attribute) else node.func
    base = UNKNOWN if isinstance(node.func, ast.Name) else evaluate(owner, state, frame)
    arguments = [evaluate(part, state, frame) for part in node.args]
    words: dict[str, Value] = {}
    for one in node.keywords:
        value = evaluate(one.value, state, frame)
        known = value.ref if one.arg is None and value.kind == "dict" and isinstance(value.ref, tuple) else ()
        words |= {key: part for key, part in known if isinstance(key, str)} or {one.arg or "": value}
    return call_value(Call(node, frame.definitions.called_name(node), base, arguments, words), state, frame)
