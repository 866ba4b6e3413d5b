"""Evaluate expressions and calls, and apply the rules to them."""

import ast
from dataclasses import replace
from functools import reduce

from instruments.static_check import modules, numeric_rules
from instruments.static_check.autocast import (
    ACTIVATIONS,
    BFLOAT16,
    DTYPES,
    FLOAT16,
    FLOAT32,
    KNOWN,
    called_name,
    last_word,
    text_of,
)
from instruments.static_check.definitions import Function
from instruments.static_check.gradient_rules import check_gradients
from instruments.static_check.state import LOWS, OTHER, UNKNOWN, Call, Frame, State, Value, either, mix, read_region


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
            left, right = evaluate(node.left, state, frame), evaluate(node.right, state, frame)
            return numeric_rules.combine(node, left, right, frame)
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
            return Value(tag="condition", ref=node)
        case ast.NamedExpr():
            value = state.values[node.target.id] = evaluate(node.value, state, frame)
            return value
        case ast.Tuple() | ast.List():
            return Value(kind="parts", ref=tuple(evaluate(part, state, frame) for part in node.elts))
        case ast.Dict():
            every = [evaluate(part, state, frame) for part in (*node.keys, *node.values) if part]
            one_of = reduce(_either, every[-len(node.values) :]) if every else UNKNOWN
            return one_of if one_of.kind == "dtype" else UNKNOWN  # one of the types, by a key
        case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
            for generator in node.generators:
                bind(generator.target, evaluate(generator.iter, state, frame).element, state)
                for condition in generator.ifs:
                    evaluate(condition, state, frame)
            return evaluate(node.elt, state, frame)  # the element that is repeated
        case ast.Lambda():
            return UNKNOWN  # its body runs at its calls
        case _:
            _look_inside(node, state, frame)
            return UNKNOWN


def _look_inside(node: ast.AST, state: State, frame: Frame) -> None:
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.expr):
            evaluate(part, state, frame)
        else:
            _look_inside(part, state, frame)


_LARGEST32 = 3.4028234663852886e38
# Attributes whose values do not have the precision of their object.
_FACTS = {"shape", "device", "grad", "ndim", "itemsize", "config", "loss"}


def _attribute(node: ast.Attribute, base: Value, state: State, frame: Frame) -> Value:  # noqa: PLR0911 - a case a kind
    known = state.values.get(text_of(node)) or _dtype(frame.definitions.full_name(node))
    if known:
        return known
    if node.attr == "dtype":
        return Value(base.precision, kind="dtype")
    if node.attr in {"min", "max"} and base.tag == "finfo32":
        return Value(constant=_LARGEST32 if node.attr == "max" else -_LARGEST32)
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
    if base.kind == "parts" and isinstance(base.ref, tuple):
        place = index.constant
        return base.ref[place] if isinstance(place, int) and -len(base.ref) <= place < len(base.ref) else UNKNOWN
    return UNKNOWN if base.is_constant else base


def _either(first: Value, second: Value) -> Value:
    kinds = ("region", "module", "scaler", "optimizer")
    made = next((value for kind in kinds for value in (first, second) if value.kind == kind), None)
    neither = Value(kind="dtype") if first.kind == second.kind == "dtype" else UNKNOWN
    return made or either(first, second) or neither


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


_CASTS = {"half": "float16", "bfloat16": "bfloat16", "float": "float32", "double": "float32"}
_PLACES = {"torch.nn.functional", "torch.special", "torch.linalg", "torch"}
# Builtins, some with the names of torch functions.
_PLAIN = {"sum", "pow", "print", "len", "min", "max", "range", "isinstance", "getattr", "str", "int", "float", "bool"}
_NO_TENSORS = {"item", "tolist", "numpy", "argmax", "argsort", "size", "dim", "numel", "long", "int", "bool", "keys"}
_PRODUCTS = dict.fromkeys(("mm", "mv", "addmm", "baddbmm"), "matmul") | dict.fromkeys(("conv1d", "conv2d"), "linear")
_NEW = {"zeros", "ones", "full", "tensor", "empty", "zeros_like", "ones_like"}
_PASSING = {
    "softmax", "sigmoid", "exp", "shifted", "negative", "max", "square", "mean", "mean_square", "square_mean", "new",
    "positions",
}  # fmt: skip
_METHODS_OF_MODULES = {*_CASTS, *modules.SAME_MODULE, "parameters", "named_parameters", "state_dict", "type_as"}


def _call(node: ast.Call, state: State, frame: Frame) -> Value:  # noqa: C901, PLR0911, PLR0912 - a case a kind
    """Value of a call; applies the rules to it."""
    func, word = node.func, frame.definitions.called_name(node)
    base = UNKNOWN
    if not isinstance(func, ast.Name):
        base = evaluate(func.value if isinstance(func, ast.Attribute) else func, state, frame)
    arguments = [evaluate(part, state, frame) for part in node.args]
    words = {one.arg or "": evaluate(one.value, state, frame) for one in node.keywords}
    call = Call(node, word, base, arguments, words)
    every = call.every
    if (done := check_gradients(call, state, frame)) is not None:
        return done
    own = isinstance(func, ast.Name) and func.id not in frame.definitions.imports
    known = frame.definitions.functions.get(word) if own else None
    if known is not None:
        return frame.file.follow(frame, state, known, None, node, every)
    if (made := _make(call, state, frame)) is not None:
        return made
    if isinstance(func, ast.Attribute) and word in _METHODS_OF_MODULES:
        listed = word in {"parameters", "named_parameters", "eval"}
        key = modules.module_key(func.value, base, state, frame, surely=listed)
        cast = _read_cast(node, every, frame)
        if cast and key is None:
            named = last_word(text_of(func.value)) == "position_ids"
            numeric_rules.check_positions(node, Value(tag="positions") if named else base, cast, frame)
            numeric_rules.check_constant(node, base.number, Value(cast), frame)
            place = base.cast if base.cast is not None and word not in _CASTS else node
            return Value(cast, "cast", base.tag if base.tag in _PASSING else "", base.scaled, cast=place)
        if key is not None:
            if cast:
                return modules.cast_module(key, cast, node, state, frame)
            if (kept := modules.module_method(node, word, key, state)) is not None:
                return kept
    if base.kind == "trainer" and word == "train":
        modules.check_trained(Value(kind="optimizer", ref=(base.ref,)), state, frame)
        return OTHER
    value = state.values.get(text_of(func), UNKNOWN) if isinstance(func, ast.Name | ast.Attribute) else base
    key = modules.module_key(func, value, state, frame)
    if key is not None:
        return _call_module(call, key, state, frame)
    function, owner = _local_function(node, base, value, state, frame)
    if function is not None:
        return frame.file.follow(frame, state, function, owner, node, every)
    operation = str(value.ref) if value.kind == "loss" else _find_operation(node, frame)
    if operation is not None:
        method = value.kind != "loss" and isinstance(func, ast.Attribute) and not frame.definitions.full_name(func)
        return numeric_rules.check_operation(node, operation, [base, *every] if method else every, call.words, frame)
    return _unknown(call, state, frame)


def _read_cast(node: ast.Call, given: list[Value], frame: Frame) -> str | None:
    """Target type of a cast such as `.half()` or `.to(torch.float16)`; None for other calls."""
    func = node.func
    if not isinstance(func, ast.Attribute) or frame.definitions.full_name(func):
        return None
    if func.attr in _CASTS and not given:
        return _CASTS[func.attr]
    if func.attr in {"to", "type", "type_as"}:
        return next((value.precision for value in given if value.kind in {"", "dtype"} and value.precision), None)
    return None


def _make(call: Call, state: State, frame: Frame) -> Value | None:  # noqa: PLR0911 - a case a kind
    """Value of a call that makes an object which the rules use; None for other calls."""
    node, word, every, words = call.node, call.word, call.every, call.words
    stored = state.values.get(text_of(node.func), UNKNOWN)
    region = stored.ref if stored.kind == "region" else read_region(call, frame)
    if region is not None:
        return Value(kind="region", ref=region)
    if word.endswith("GradScaler"):
        given = [one.value for one in node.keywords if one.arg == "enabled"]
        off = any(isinstance(one, ast.Constant) and not one.value for one in given)
        return OTHER if off else Value(kind="scaler")
    if word.endswith("Scaler") and word[:1].isupper():
        return OTHER
    if word in {"Accelerator", "Fabric"}:
        return Value(kind="accelerator")
    if word == "prepare" and len(every) > 1:
        return Value(kind="parts", ref=tuple(every))
    if word.endswith("Trainer") and word[:1].isupper():
        model = words.get("model") or (every[0] if every else UNKNOWN)
        return Value(kind="trainer", ref=model.ref) if model.kind == "module" else OTHER
    if word in {"set_default_dtype", "set_default_tensor_type"}:
        half = any(value.kind == "dtype" and value.precision == FLOAT16 for value in every)
        state.default = node if half or "HalfTensor" in ast.unparse(node) else None
        return OTHER
    if word in {"zip", "enumerate"}:
        parts = tuple(value.element for value in every)
        return Value(kind="zip", ref=parts if word == "zip" else (UNKNOWN, *parts[:1]))
    instance = Value(kind="instance", ref=text_of(node.func)) if text_of(node.func) in frame.definitions.bases else None
    return modules.make_module(call, state, frame) or modules.make_optimizer(node, state, frame) or instance


def _find_operation(node: ast.Call, frame: Frame) -> str | None:
    """Name of the torch operation that a call runs, as a function or a tensor method; None for other calls."""
    full = frame.definitions.full_name(node.func)
    if full:
        place, _dot, name = full.rpartition(".")
        name = _PRODUCTS.get(name, name)
        return name if place in _PLACES and name in KNOWN else None
    return called_name(node) if isinstance(node.func, ast.Attribute) and node.func.attr in KNOWN else None


def _local_function(
    node: ast.Call, base: Value, value: Value, state: State, frame: Frame
) -> tuple[Function | None, str | None]:
    """The function of this file that a call runs, and its class."""
    definitions, text = frame.definitions, text_of(node.func)
    owner, name = None, called_name(node)
    if text == "self":
        owner, name = frame.class_name, "forward"
    elif isinstance(node.func, ast.Attribute) and text_of(node.func.value) == "self":
        owner = frame.class_name
    elif base.kind == "instance":
        owner = str(base.ref)
    elif base.kind == "module":
        owner = state.module(base.ref).name
    elif value.kind == "instance":
        owner, name = str(value.ref), "__call__"
    return (definitions.method(owner, name) if owner and name else None), owner


def _call_module(call: Call, key: object, state: State, frame: Frame) -> Value:
    """Output of a module: from its forward if it is in the file, else in the type of autocast or of its weights."""
    module = state.module(key)
    weights = None if module.idle else module.precision or frame.weights
    arguments = [replace(value, origin="weights") if value.is_low else value for value in call.arguments]
    inner = replace(frame, weights=weights)
    forward = frame.definitions.method(module.name, "forward") if module.name in frame.definitions.bases else None
    if forward is not None:
        every = [*arguments, *call.words.values()]
        value = frame.file.follow(inner, state, forward, module.name, call.node, every)
        return value if value.precision or value.tag else _output(arguments, inner, idle=module.idle)
    operation = ACTIVATIONS.get(module.name)
    if operation is not None:
        known = arguments[:1] if arguments and arguments[0].precision else [_output(arguments, inner, idle=module.idle)]
        return numeric_rules.check_operation(call.node, operation, known, {}, inner)
    if "Norm" in module.name and frame.region.enabled:
        return Value("float32") if frame.fate("layer_norm") == "float32" else mix(arguments[:1])
    return _output(arguments, inner, idle=module.idle)


def _output(arguments: list[Value], frame: Frame, *, idle: bool = False) -> Value:
    if idle:
        return UNKNOWN
    if frame.region.enabled:
        return Value(frame.region.dtype, "autocast", "output") if frame.region.certain else UNKNOWN
    if frame.weights:
        return Value(frame.weights, "weights", "output")
    low = arguments[0] if arguments and arguments[0].is_low else UNKNOWN
    return Value(low.precision, "weights" if low.is_low else "", "output")


def _unknown(call: Call, state: State, frame: Frame) -> Value:  # noqa: C901, PLR0911, PLR0912 - a case a kind
    """Value of all other calls: tensor methods keep the type; most others are unknown."""
    node, func, word, base, every = call.node, call.node.func, call.word, call.base, call.every
    numeric_rules.check_names(call, frame)
    if word == "getattr" and every[1:] and every[1].constant in DTYPES and text_of(node.args[0]) == "torch":
        return Value(DTYPES[str(every[1].constant)], kind="dtype")
    if word == "float" and every and every[0].number is not None:
        return every[0]
    if word in _NO_TENSORS | _PLAIN or "loss" in word.lower() or numeric_rules.CRITERION.fullmatch(word):
        return UNKNOWN
    full, asked = frame.definitions.full_name(func), call.words.get("dtype", UNKNOWN)
    method = isinstance(func, ast.Attribute) and not full
    own = isinstance(func, ast.Attribute) and text_of(func.value) == "self"
    if own and frame.class_name and frame.definitions.is_module_class(frame.class_name):
        return _output(every, frame)
    if full.startswith("torch.") and asked.precision in LOWS:
        for value in every:
            numeric_rules.check_constant(node, value.number, asked, frame)
        numeric_rules.check_positions(node, numeric_rules.read_positions(call), str(asked.precision), frame)
        return Value(asked.precision, "cast", "new" if word in _NEW else "", cast=node)
    if method and base.precision is not None and not base.kind:
        if word == "to" and any("dtype" in text_of(part) or "type" in text_of(part) for part in node.args):
            return UNKNOWN
        kept = "negative" if word == "neg" else base.tag if word in numeric_rules.KEEPING else ""
        return replace(base, tag=kept, cast=base.cast if word in modules.SAME_MODULE else None)
    if full in {"torch.arange", "torch.outer", "torch.cat", "torch.stack"}:
        return numeric_rules.read_positions(call)
    if full == "torch.finfo" and (not every or every[0].precision in {FLOAT32, BFLOAT16}):
        return Value(tag="finfo32")
    if full.startswith("torch.") and word in _NEW:
        return Value(tag="new", constant=every[0].number if word == "tensor" and every else None)
    if method and word in numeric_rules.KEEPING and base.tag in _PASSING:
        return Value(tag=base.tag)
    if full and not node.keywords and len(every) == 1:
        return mix(every)
    return UNKNOWN
