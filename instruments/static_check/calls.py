"""Values of calls: of modules, casts, operations, and calls on gradients."""

import ast
import re
from dataclasses import replace

from instruments.static_check.autocast import ACTIVATIONS, AUTOCASTS, FLOAT16, KNOWN, LOW, called_name, text_of
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
from instruments.static_check.numeric_rules import KEEPING, check_constant, check_growing, check_operation
from instruments.static_check.source import WARNING
from instruments.static_check.state import (
    LOWS,
    OTHER,
    UNKNOWN,
    Call,
    Frame,
    Module,
    Region,
    State,
    Value,
    element_of,
    mix,
)

_CASTS = {"half": "float16", "bfloat16": "bfloat16", "float": "float32", "double": "float32"}
_PLACES = {"torch.nn.functional", "torch.special", "torch.linalg", "torch"}
# Builtins, some with the names of torch functions.
_PLAIN = {"sum", "pow", "print", "len", "min", "max", "range", "isinstance", "getattr", "str", "int", "float", "bool"}
_NO_TENSORS = {"item", "tolist", "numpy", "argmax", "argsort", "size", "dim", "numel", "long", "int", "bool", "keys"}
# Contexts of accelerate, Fabric and transformers' Trainer, which follow the library's mixed_precision setting.
_MANAGED = {"autocast", "compute_loss_context_manager", "autocast_smart_context_manager"}
_DEFAULTS = {"cuda": FLOAT16, "cpu": "bfloat16"}
_PRODUCTS = dict.fromkeys(("mm", "mv", "addmm", "baddbmm"), "matmul") | dict.fromkeys(("conv1d", "conv2d"), "linear")
_NEW = {"zeros", "ones", "full", "tensor", "empty", "zeros_like", "ones_like"}
_CRITERION = re.compile(r"crit(?:erion)?(?:_\w+)?|loss_(?:fn|func|function)")
_PASSING = {
    "softmax", "sigmoid", "exp", "shifted", "negative", "max", "square", "mean", "mean_square", "square_mean", "new",
}  # fmt: skip
_METHODS_OF_MODULES = {*_CASTS, *SAME_MODULE, "parameters", "named_parameters", "state_dict"}


def call_value(call: Call, state: State, frame: Frame) -> Value:  # noqa: C901, PLR0911 - a case a kind
    """Value of a call with evaluated arguments; applies the rules to it."""
    node, func, word, base, every = call.node, call.node.func, call.word, call.base, call.every
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
        key = module_key(func.value, base, state, frame, surely=listed)
        cast = _read_cast(node, every, frame)
        if cast and key is None:
            place = base.cast if base.cast is not None and word not in _CASTS else node
            return Value(cast, "cast", base.tag if base.tag in _PASSING else "", base.scaled, cast=place)
        if key is not None:
            kept = cast_module(key, cast, node, state, frame) if cast else module_method(node, word, key, state)
            if kept is not None:
                return kept
    if base.kind == "trainer" and word == "train":
        check_trained(Value(kind="optimizer", ref=(base.ref,)), state, frame)
        return OTHER
    value = state.values.get(text_of(func), UNKNOWN) if isinstance(func, ast.Name | ast.Attribute) else base
    key = module_key(func, value, state, frame)
    if key is not None:
        return _call_module(call, state.modules.get(key, Module()), call.arguments, state, frame)
    function, owner = _local_function(node, base, value, state, frame)
    if function is not None:
        return frame.file.follow(frame, state, function, owner, node, every)
    operation = str(value.ref) if value.kind == "loss" else _find_operation(node, frame)
    if operation is not None:
        method = value.kind != "loss" and isinstance(func, ast.Attribute) and not frame.definitions.full_name(func)
        return check_operation(node, operation, [base, *every] if method else every, call.words, frame)
    return _unknown(call, state, frame)


def _read_cast(node: ast.Call, given: list[Value], frame: Frame) -> str | None:
    """Target type of a cast such as `.half()` or `.to(torch.float16)`; None for other calls."""
    func = node.func
    if not isinstance(func, ast.Attribute) or frame.definitions.full_name(func):
        return None
    if func.attr in _CASTS and not given:
        return _CASTS[func.attr]
    if func.attr in {"to", "type"}:
        return next((value.precision for value in given if value.kind == "dtype" and value.precision), None)
    return None


def _make(call: Call, state: State, frame: Frame) -> Value | None:  # noqa: C901, PLR0911 - a case a kind
    """Value of a call that makes an object which the rules use; None for other calls."""
    node, word, every, words = call.node, call.word, call.every, call.words
    stored = state.values.get(text_of(node.func), UNKNOWN)
    region = stored.ref if stored.kind == "region" else _read_region(call, frame)
    if region is not None:
        return Value(kind="region", ref=region)
    if word.endswith("GradScaler"):
        given = [one.value for one in node.keywords if one.arg == "enabled"]
        return OTHER if any(isinstance(one, ast.Constant) and not one.value for one in given) else Value(kind="scaler")
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
    if word == "dict":
        return Value(kind="dict", ref=tuple(words.items()))
    if word == "map" and len(every) > 1:
        return element_of(every[1])
    if word in {"zip", "enumerate"}:
        parts = tuple(element_of(value) for value in every)
        return Value(kind="zip", ref=parts if word == "zip" else (UNKNOWN, *parts[:1]))
    instance = Value(kind="instance", ref=text_of(node.func)) if text_of(node.func) in frame.definitions.bases else None
    return make_module(call, state, frame) or make_optimizer(node, state, frame) or instance


def _read_region(call: Call, frame: Frame) -> Region | None:
    """The autocast region that a call opens; None for other calls."""
    node, word, every, words = call.node, call.word, call.every, call.words
    if word == "partial" and node.args:
        node, every = ast.copy_location(ast.Call(node.args[0], node.args[1:], node.keywords), node), every[1:]
        word = frame.definitions.called_name(node)
    full = frame.definitions.full_name(node.func)
    if full not in AUTOCASTS:
        if word not in _MANAGED:
            return None
        policy = frame.definitions.policy("accelerate", "lightning")
        precision = policy.precision if policy and policy.precision in LOWS else None
        return Region(True, "cuda", precision) if precision else Region(certain=False)
    device = next((kind for kind in ("cuda", "cpu") if f"{kind}.amp" in full), None)
    enabled = next((one.value for one in node.keywords if one.arg == "enabled"), None)
    if device is not None:  # torch.cuda.amp.autocast(enabled, dtype)
        enabled = node.args[0] if node.args else enabled
    else:
        kind = words.get("device_type") or (every[0] if node.args else UNKNOWN)
        device = kind.constant.partition(":")[0] if isinstance(kind.constant, str) else None
    off = isinstance(enabled, ast.Constant) and enabled.value is False
    dtype = words.get("dtype") or (every[1] if len(node.args) > 1 else None)
    if dtype is None:
        return Region(not off, device, _DEFAULTS.get(device or "", LOW))
    return Region(enabled=False) if dtype.precision == "float32" else Region(not off, device, dtype.precision or LOW)


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
        owner = state.modules.get(base.ref, Module()).name
    elif value.kind == "instance":
        owner, name = str(value.ref), "__call__"
    return (definitions.method(owner, name) if owner and name else None), owner


def _call_module(call: Call, module: Module, arguments: list[Value], state: State, frame: Frame) -> Value:
    """Output of a module: from its forward if it is in the file, else in the type of autocast or of its weights."""
    weights = None if module.idle else module.precision or frame.weights
    arguments = [replace(value, origin="weights") if value.is_low else value for value in arguments]
    inner = replace(frame, weights=weights)
    forward = frame.definitions.method(module.name, "forward") if module.name in frame.definitions.bases else None
    if forward is not None:
        every = [*arguments, *call.words.values()]
        value = frame.file.follow(inner, state, forward, module.name, call.node, every)
        return value if value.precision or value.tag else _output(arguments, inner, idle=module.idle)
    if module.parts:
        for part in module.parts:
            if part.kind == "module":
                within = state.modules.get(part.ref, Module())
                within = replace(within, precision=within.precision or weights)
                arguments = [_call_module(call, within, arguments, state, inner)]
        return arguments[0]
    operation = ACTIVATIONS.get(module.name)
    if operation is not None:
        known = arguments[:1] if arguments and arguments[0].precision else [_output(arguments, inner, idle=module.idle)]
        return check_operation(call.node, operation, known, {}, inner)
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


def _unknown(call: Call, state: State, frame: Frame) -> Value:  # noqa: C901, PLR0911 - a case a kind
    """Value of all other calls: tensor methods keep the type; most others are unknown."""
    node, func, word, base, every = call.node, call.node.func, call.word, call.base, call.every
    _check_names(call, frame)
    if word in _NO_TENSORS | _PLAIN or "loss" in word.lower() or _CRITERION.fullmatch(word):
        return UNKNOWN
    full, asked = frame.definitions.full_name(func), call.words.get("dtype", UNKNOWN)
    method = isinstance(func, ast.Attribute) and not full
    own = isinstance(func, ast.Attribute) and text_of(func.value) == "self"
    if own and frame.class_name and frame.definitions.is_module_class(frame.class_name):
        return _output(every, frame)
    if full.startswith("torch.") and asked.precision in LOWS:
        for value in every:
            check_constant(node, value.number, asked, frame)
        if word == "arange":
            frame.report("LP110", node, f"{ast.unparse(node)}: integers in {asked.precision}")
        return Value(asked.precision, "cast", "new" if word in _NEW else "", cast=node)
    if method and base.precision is not None and not base.kind:
        if word == "to" and any("dtype" in text_of(part) or "type" in text_of(part) for part in node.args):
            return UNKNOWN
        return replace(base, tag=base.tag if word in KEEPING else "", cast=base.cast if word in SAME_MODULE else None)
    if full.startswith("torch.") and word in _NEW:
        return Value(tag="new")
    if method and word in KEEPING and base.tag in _PASSING:
        return Value(tag=base.tag)
    if full.startswith("einops.") and every:
        return Value(every[0].precision, every[0].origin)
    if full and not node.keywords and len(every) == 1:
        return mix(every)
    return UNKNOWN


def _check_names(call: Call, frame: Frame) -> None:
    """LP102 of a criterion, LP105 of a running average, LP107 of a bound, all known by the name of the function."""
    node, word, base, every = call.node, call.word, call.base, call.every
    low = next((value for value in every if value.is_low), None)
    if _CRITERION.fullmatch(word) and low and low.origin == "autocast" and not (frame.region.enabled or frame.no_grad):
        severity = None if low.precision == FLOAT16 else WARNING
        frame.report("LP102", node, f"{word} outside autocast, of {low.precision} values", severity)
    if word in {"mul_", "lerp_"} and base.kind == "parameter" and _averages(call):
        check_growing(node, base, frame)
    if word in {"masked_fill", "masked_fill_", "clamp", "clip", "clamp_min", "clamp_", "where"}:
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
