"""The value of an expression; the rules are applied on the way."""

import ast
import re
from dataclasses import replace

from instruments.static_check.autocast import (
    ACTIVATIONS,
    AUTOCASTS,
    DTYPES,
    FLOAT16,
    KNOWN,
    LOW,
    called_name,
    last_word,
    text_of,
)
from instruments.static_check.definitions import Function
from instruments.static_check.gradient_rules import check_gradients
from instruments.static_check.modules import (
    SAME_MODULE,
    cast_module,
    check_trained,
    make_module,
    make_optimizer,
    module_key,
    module_method,
)
from instruments.static_check.numeric_rules import KEEPING, check_constant, check_growing, check_operation, combine
from instruments.static_check.rules import report
from instruments.static_check.source import WARNING
from instruments.static_check.state import LOWS, OTHER, UNKNOWN, Frame, Module, Region, State, Value, mix

_CASTS = {"half": "float16", "bfloat16": "bfloat16", "float": "float32", "double": "float32"}
_PLACES = {"torch.nn.functional", "torch.special", "torch.linalg", "torch"}
# Modules and builtins whose functions of the same names are not torch's.
_PLAIN = {"sum", "pow", "print", "len", "min", "max", "range", "isinstance", "getattr", "str", "int", "float", "bool"}
_NO_TENSORS = {"item", "tolist", "numpy", "argmax", "argsort", "size", "dim", "numel", "long", "int", "bool", "keys"}
# Of accelerate, Lightning Fabric, transformers' Trainer: mixed_precision decides.
_MANAGED = {"autocast", "compute_loss_context_manager", "autocast_smart_context_manager"}
_DEFAULTS = {"cuda": FLOAT16, "cpu": "bfloat16"}
_PRODUCTS = {
    "mm": "matmul",
    "mv": "matmul",
    "addmm": "matmul",
    "baddbmm": "bmm",
    "conv2d": "linear",
    "conv1d": "linear",
}
_NEW = {"zeros", "ones", "full", "tensor", "empty", "zeros_like", "ones_like"}
_CRITERION = re.compile(r"crit(?:erion)?(?:_\w+)?|loss_(?:fn|func|function)")
_METHODS_OF_MODULES = {*_CASTS, *SAME_MODULE, "parameters", "named_parameters", "state_dict"}


def evaluate(node: ast.expr, state: State, frame: Frame) -> Value:  # noqa: C901, PLR0911, PLR0912 - a case a kind
    """Its value; everything inside is looked at on the way, once."""
    match node:
        case ast.Call():
            return _call(node, state, frame)
        case ast.Constant():
            constant = node.value
            usable = isinstance(constant, float | int | str) and not isinstance(constant, bool)
            return Value(constant=constant) if usable else UNKNOWN  # type: ignore[arg-type]
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
            if isinstance(node.op, ast.USub):
                number = value.constant
                return (
                    replace(value, constant=-number)
                    if isinstance(number, float | int)
                    else replace(value, tag="negative")
                )
            return UNKNOWN if isinstance(node.op, ast.Not) else value
        case ast.IfExp():
            evaluate(node.test, state, frame)
            return _either(evaluate(node.body, state, frame), evaluate(node.orelse, state, frame))
        case ast.Compare() | ast.BoolOp():
            _look_inside(node, state, frame)
            return Value(tag=f"?{ast.unparse(node)}")
        case ast.NamedExpr():
            value = evaluate(node.value, state, frame)
            state.values[node.target.id] = value
            return value
        case ast.Tuple() | ast.List():
            return Value(kind="parts", ref=tuple(evaluate(part, state, frame) for part in node.elts))
        case ast.Dict():
            keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
            return Value(kind="dict", ref=tuple(zip(keys, [evaluate(one, state, frame) for one in node.values])))  # noqa: B905
        case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
            for generator in node.generators:
                bind(generator.target, element_of(evaluate(generator.iter, state, frame)), state)
                for condition in generator.ifs:
                    evaluate(condition, state, frame)
            return evaluate(node.elt, state, frame)
        case ast.Starred():
            return evaluate(node.value, state, frame)
        case ast.Lambda():
            return UNKNOWN  # it runs elsewhere
        case _:
            _look_inside(node, state, frame)
            return UNKNOWN


def _look_inside(node: ast.AST, state: State, frame: Frame) -> None:
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.expr):
            evaluate(part, state, frame)
        else:
            _look_inside(part, state, frame)


# Of a tensor, but no tensors of its precision.
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
    """`torch.float16` and the like."""
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


def element_of(value: Value) -> Value:
    """What a loop over it gives."""
    if value.kind == "zip":
        return replace(value, kind="parts")
    if value.kind == "parameters":
        return replace(value, kind="parameter")
    if value.kind == "parts" and isinstance(value.ref, tuple) and value.ref:
        return value.ref[0] if all(part == value.ref[0] for part in value.ref) else UNKNOWN
    return value if value.kind in {"", "module", "parameter"} and not value.is_constant else UNKNOWN


def _either(first: Value, second: Value) -> Value:
    if first == second:
        return first
    for kind in ("region", "module", "scaler", "optimizer"):
        one = next((value for value in (first, second) if value.kind == kind), None)
        if one is not None:
            return one
    return Value(kind="dtype") if first.kind == second.kind == "dtype" else UNKNOWN


def bind(target: ast.expr, value: Value, way: State) -> None:
    """Give a target its value; losses that a model returns are in a type of their own."""
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


def _call(node: ast.Call, state: State, frame: Frame) -> Value:  # noqa: C901, PLR0911 - a case a kind
    func, word = node.func, called_name(node)
    base = evaluate(func.value, state, frame) if isinstance(func, ast.Attribute) else UNKNOWN
    if not isinstance(func, ast.Attribute | ast.Name):
        base = evaluate(func, state, frame)
    arguments = [evaluate(part, state, frame) for part in node.args]
    words = {one.arg or "": evaluate(one.value, state, frame) for one in node.keywords}
    every = [*arguments, *words.values()]
    done = check_gradients(node, base, every, state, frame)
    known = frame.definitions.functions.get(word) if isinstance(func, ast.Name) else None
    if done is None and known is not None and word not in frame.definitions.imports:
        return frame.report.follow(frame, state, known, None, node, every)
    if done is None:
        done = _make(node, word, base, every, words, state, frame)
    if done is not None:
        return done
    if isinstance(func, ast.Attribute) and word in _METHODS_OF_MODULES:
        listed = word in {"parameters", "named_parameters", "eval"}
        key = module_key(func.value, base, state, frame, surely=listed)
        cast = _read_cast(node, every, frame)
        if cast and key is None:
            return Value(
                cast, "cast", base.tag if base.tag in _PASSING else "", base.scaled, cast=_cast_place(node, base)
            )
        if key is not None:
            kept = cast_module(key, cast, node, state, frame) if cast else module_method(node, word, key, state)
            if kept is not None:
                return kept
    if base.kind == "trainer" and word == "train":
        check_trained(Value(kind="optimizer", ref=(base.ref,)), state, frame)
        return OTHER
    value = state.values.get(text_of(func), UNKNOWN)
    key = module_key(func, value, state, frame)
    if key is not None:
        return _call_module(node, state.modules.get(key, Module()), arguments, words, state, frame)
    function, owner = _local_function(node, base, value, state, frame)
    if function is not None:
        return frame.report.follow(frame, state, function, owner, node, every)
    operation = str(value.ref) if value.kind == "loss" else _find_operation(node, frame)
    if operation is not None:
        method = value.kind != "loss" and isinstance(func, ast.Attribute) and not frame.definitions.full_name(func)
        return check_operation(node, operation, [base, *every] if method else every, words, frame)
    return _unknown(node, word, base, every, words, state, frame)


_PASSING = {
    "softmax",
    "sigmoid",
    "exp",
    "shifted",
    "negative",
    "max",
    "square",
    "mean",
    "mean_square",
    "square_mean",
    "new",
}


def _cast_place(node: ast.Call, base: Value) -> ast.expr:
    return base.cast if base.cast is not None and called_name(node) not in _CASTS else node


def _read_cast(node: ast.Call, given: list[Value], frame: Frame) -> str | None:
    """The type that `.half()`, `.to(torch.float16)` and the like cast to."""
    func = node.func
    if not isinstance(func, ast.Attribute) or frame.definitions.full_name(func):
        return None
    if func.attr in _CASTS and not given:
        return _CASTS[func.attr]
    if func.attr in {"to", "type"}:
        return next((value.precision for value in given if value.kind == "dtype" and value.precision), None)
    return None


def _make(  # noqa: C901, PLR0911 - a case a kind
    node: ast.Call, word: str, base: Value, every: list[Value], words: dict[str, Value], state: State, frame: Frame
) -> Value | None:
    """What a call makes, as far as rules ask for it."""
    region = read_region(node, word, every, words, frame)
    if region is not None:
        return Value(kind="region", ref=region)
    if word.endswith("GradScaler"):
        off = any(
            one.arg == "enabled" and isinstance(one.value, ast.Constant) and not one.value.value
            for one in node.keywords
        )
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
        parts = tuple(element_of(value) for value in every)
        return Value(kind="zip", ref=parts if word == "zip" else (UNKNOWN, *parts[:1]))
    made = make_module(node, every, words, state, frame)
    if made == UNKNOWN:
        made = make_optimizer(node, state, frame)
    if made == UNKNOWN and text_of(node.func) in frame.definitions.bases:
        return Value(kind="instance", ref=text_of(node.func))
    return None if made == UNKNOWN else made


def read_region(node: ast.Call, word: str, every: list[Value], words: dict[str, Value], frame: Frame) -> Region | None:
    """The autocast region that a call opens; None where it is none."""
    full = frame.definitions.full_name(node.func)
    if full not in AUTOCASTS:
        if word not in _MANAGED:
            return None
        policy = frame.definitions.policy("accelerate", "lightning")
        precision = policy.precision if policy and policy.precision in LOWS else None
        return Region(True, "cuda", precision) if precision else Region(certain=False)
    place = next((kind for kind in ("cuda", "cpu") if f"{kind}.amp" in full), None)
    given = {one.arg: one.value for one in node.keywords}
    first = node.args[0] if node.args else None
    device, enabled, dtype = place, given.get("enabled"), words.get("dtype")
    if place is not None:  # torch.cuda.amp.autocast(enabled, dtype)
        enabled = first or enabled
        dtype = dtype or (every[1] if len(node.args) > 1 else None)
    else:
        kind = words.get("device_type") or (every[0] if node.args else UNKNOWN)
        device = kind.constant.partition(":")[0] if isinstance(kind.constant, str) else None
        dtype = dtype or (every[1] if len(node.args) > 1 else None)
    off = isinstance(enabled, ast.Constant) and enabled.value is False
    if dtype is not None:
        if dtype.precision == "float32":
            return Region(enabled=False)
        return Region(not off, device, dtype.precision or LOW)
    return Region(not off, device, _DEFAULTS.get(device or "", LOW))


def _find_operation(node: ast.Call, frame: Frame) -> str | None:
    """What torch calls what is called: a function, a method of a tensor."""
    full = frame.definitions.full_name(node.func)
    if full:
        place, _dot, name = full.rpartition(".")
        name = _PRODUCTS.get(name, name)
        return name if place in _PLACES and name in KNOWN else None
    return called_name(node) if isinstance(node.func, ast.Attribute) and node.func.attr in KNOWN else None


def _local_function(
    node: ast.Call, base: Value, value: Value, state: State, frame: Frame
) -> tuple[Function | None, str | None]:
    """The function of this file that is called, and its class."""
    definitions, text = frame.definitions, text_of(node.func)
    owner, name = None, called_name(node)
    if text == "self":
        owner, name = frame.class_name, "forward"
    elif isinstance(node.func, ast.Attribute) and text_of(node.func.value) == "self":
        owner = frame.class_name
    elif base.kind == "instance":
        owner = str(base.ref)
    elif base.kind == "module":
        owner = state.modules.get(base.ref, Module()).name
    elif value.kind == "instance":
        owner, name = str(value.ref), "__call__"
    return (definitions.method(owner, name) if owner and name else None), owner


def _call_module(
    node: ast.Call, module: Module, arguments: list[Value], words: dict[str, Value], state: State, frame: Frame
) -> Value:
    """What comes out of a module: walked where the file has it, else in the type of autocast or of its weights."""
    weights = None if module.idle else module.precision or frame.weights
    arguments = [replace(value, origin="weights") if value.is_low else value for value in arguments]
    inner = replace(frame, weights=weights)
    forward = frame.definitions.method(module.name, "forward") if module.name in frame.definitions.bases else None
    if forward is not None:
        value = frame.report.follow(inner, state, forward, module.name, node, [*arguments, *words.values()])
        return value if value.precision or value.tag else _output(arguments, inner, idle=module.idle)
    if module.parts:
        for part in module.parts:
            if part.kind == "module":
                within = state.modules.get(part.ref, Module())
                within = replace(within, precision=within.precision or weights)
                arguments = [_call_module(node, within, arguments, words, state, inner)]
        return arguments[0]
    operation = ACTIVATIONS.get(module.name)
    if operation is not None:
        known = arguments[:1] if arguments and arguments[0].precision else [_output(arguments, inner, idle=module.idle)]
        return check_operation(node, operation, known, {}, inner)
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


def _unknown(  # noqa: C901, PLR0911, PLR0912 - a case a kind
    node: ast.Call, word: str, base: Value, every: list[Value], words: dict[str, Value], state: State, frame: Frame
) -> Value:
    """Methods keep the type of their tensor; what others compute is not known."""
    text, func = text_of(node.func), node.func
    low = next((value for value in every if value.is_low), None)
    if _CRITERION.fullmatch(word):
        if low and low.origin == "autocast" and not frame.region.enabled and not frame.no_grad:
            severity = None if low.precision == FLOAT16 else WARNING
            report(frame, "LP102", node, f"{word} outside autocast, of {low.precision} values", severity)
        return UNKNOWN
    if word in {"mul_", "lerp_"} and base.kind == "parameter" and _averages(node, every):
        check_growing(node, base, frame)
    if word in {"masked_fill", "masked_fill_", "clamp", "clip", "clamp_min", "clamp_", "where"}:
        tensor = next((value for value in [base, *every] if value.is_low), base)
        for value in every:
            if isinstance(value.constant, float | int):
                check_constant(node, value.constant, tensor, frame)
    if word in _NO_TENSORS or word in _PLAIN or "loss" in word.lower():
        return UNKNOWN
    if (
        text.startswith("self.")
        and text.count(".") == 1
        and frame.class_name
        and frame.definitions.is_module_class(frame.class_name)
    ):
        return _output(every, frame)
    full, asked = frame.definitions.full_name(func), words.get("dtype", UNKNOWN)
    if full.startswith("torch.") and asked.precision in LOWS:
        for value in every:
            if isinstance(value.constant, float | int):
                check_constant(node, value.constant, asked, frame)
        if word == "arange":
            report(frame, "LP110", node, f"{ast.unparse(node)}: integers in {asked.precision}")
        return Value(asked.precision, "cast", "new" if word in _NEW else "", cast=node)
    if isinstance(func, ast.Attribute) and not full and base.precision is not None and not base.kind:
        if word == "to" and any("dtype" in text_of(part) or "type" in text_of(part) for part in node.args):
            return UNKNOWN
        return Value(
            base.precision,
            base.origin,
            base.tag if word in KEEPING else "",
            base.scaled,
            cast=base.cast if word in SAME_MODULE else None,
        )
    if full.startswith("torch.") and word in _NEW:
        return Value(tag="new")
    if isinstance(func, ast.Attribute) and not full and word in KEEPING and base.tag in _PASSING:
        return Value(tag=base.tag)
    if full and not node.keywords and len(every) == 1:
        return Value(mix(every).precision, mix(every).origin)
    return UNKNOWN


def _averages(node: ast.Call, every: list[Value]) -> bool:
    """Whether it multiplies by a decay next to 1."""
    numbers = [value.constant for value in every if isinstance(value.constant, float)]
    named = re.search(r"decay|ema|momentum|beta", " ".join(ast.unparse(part) for part in node.args), re.IGNORECASE)
    most = 0.1 if called_name(node) == "lerp_" else 0.0
    return any(0.9 <= abs(number) < 1 or 0 < number <= most for number in numbers) or bool(named)
