"""Track how modules are made, cast and trained; the rules on 16-bit weights (LP101, LP106)."""

import ast
import re
from dataclasses import replace

from instruments.static_check.autocast import DTYPES, FLOAT16, LOSS_MODULES, last_word, text_of
from instruments.static_check.source import NOTE, WARNING
from instruments.static_check.state import LOWS, OTHER, UNKNOWN, Call, Frame, Module, State, Value

_MODEL_NAMES = {
    "model", "net", "network", "unet", "generator", "discriminator", "policy", "student", "actor", "critic",
    "netG", "netD", "model_engine", "classifier", "autoencoder", "vae",
}  # fmt: skip
_WRAPPERS = {
    "compile", "DataParallel", "DistributedDataParallel", "DDP", "FSDP", "FullyShardedDataParallel", "script",
    "prepare_model", "convert_sync_batchnorm", "ModuleList", "checkpoint_wrapper",
}  # fmt: skip
# Methods that return their module.
SAME_MODULE = {"to", "cuda", "cpu", "train", "eval", "requires_grad_", "apply", "to_empty", "type"}
_NORM = re.compile(r"(?:Batch|Layer|Group|Instance|RMS)Norm(?:[123]d)?$")
_OPTIMIZERS = re.compile(r"Adam|SGD|Lion|Adafactor|RMSprop|Adagrad|LAMB|LARS|[Oo]ptim")
_STEPS = re.compile(r"(?:^|_)step$|^_?optimi[sz]e(?:_|$)|^optimizers$")  # methods that use optimizers


def named_like_model(text: str) -> bool:
    """Whether it is a usual name of a trained model."""
    word = last_word(text)
    return word in _MODEL_NAMES or word.endswith(("_model", "_net", "Net")) or bool(re.fullmatch(r"net_?[A-Z]", word))


def module_key(node: ast.expr, value: Value, state: State, frame: Frame, *, surely: bool = False) -> object:
    """Key of the module that an expression denotes, None if none; unknown ones need a model's name, or `surely`."""
    if value.kind == "module":
        return value.ref
    text = text_of(node)
    if value.kind or text == "self" or not (surely or named_like_model(text)):
        return None
    scope = frame.class_name if text.startswith("self.") else id(frame.stack[-1]) if frame.stack else 0
    key = (scope, text or ast.unparse(node))
    low = value.is_low and value.cast is not None
    if key not in state.modules or low:
        default = state.default if value.precision is None else None
        precision = FLOAT16 if default else value.precision if low else None
        state.modules[key] = Module(precision=precision, cast=value.cast if low else default)
    if text:
        state.values[text] = Value(kind="module", ref=key)
    return key


def make_module(call: Call, state: State, frame: Frame) -> Value | None:
    """Value of a call that makes a module or returns its argument; None for other calls."""
    node, word, arguments = call.node, call.word, call.every
    full = frame.definitions.full_name(node.func)
    if word in _WRAPPERS or (word == "prepare" and len(arguments) == 1):
        key = module_key(node.args[0], arguments[0], state, frame, surely=True) if node.args else None
        return Value(kind="module", ref=key) if key is not None else OTHER if word == "ModuleList" else None
    if word in {"deepcopy", "get_peft_model"} and arguments and arguments[0].kind == "module":
        copied = replace(state.module(arguments[0].ref), trained=False, idle=True)
        state.modules[id(node)] = copied if word == "deepcopy" else Module()  # adapters are trained in float32
        return Value(kind="module", ref=id(node))
    of_torch = full.startswith("torch.nn.") and word[:1].isupper() and ".utils." not in full
    if of_torch and word in LOSS_MODULES:
        return Value(kind="loss", ref=LOSS_MODULES[word])
    if of_torch and word in {"Parameter", "Buffer"}:
        return Value(kind="parameter")
    loaded = word in {"from_pretrained", "from_config", "_from_config"} and "oken" not in text_of(node.func)
    if not (of_torch or loaded or frame.definitions.is_module_class(text_of(node.func))):
        return None
    asked = call.words.get("torch_dtype") or call.words.get("dtype") or UNKNOWN
    precision = DTYPES.get(str(asked.constant)) if asked.is_constant else asked.precision
    low = precision in LOWS
    module = Module("" if loaded else word, precision if low else None, node if low else None)
    if state.default is not None and precision is None:
        module = replace(module, precision=FLOAT16, cast=state.default)
    state.modules[id(node)] = module
    if low and of_torch and _NORM.search(word):
        frame.report("LP106", node, f"{word} in {precision}")
    return Value(kind="module", ref=id(node))


def cast_module(key: object, precision: str, node: ast.Call, state: State, frame: Frame) -> Value:
    """Cast a module in place, as `.half()` does."""
    module = state.module(key)
    low = precision in LOWS
    state.modules[key] = replace(module, precision=precision if low else None, cast=node if low else None)
    if low and _NORM.search(module.name) and not module.idle and module.name not in frame.definitions.bases:
        frame.report("LP106", node, f"{module.name} in {precision}")
    return Value(kind="module", ref=key)


def module_method(node: ast.Call, word: str, key: object, state: State) -> Value | None:
    """Value of a method that returns, freezes or lists a module; None for other methods."""
    module = state.module(key)
    if word in {"parameters", "named_parameters", "state_dict"}:
        return Value(module.precision, "weights", kind="parameters", ref=key)
    first = node.args[0] if node.args else None
    off = isinstance(first, ast.Constant) and first.value is False
    if word == "eval" or (word in {"train", "requires_grad_"} and off):
        state.modules[key] = replace(module, idle=True)
    elif word in {"train", "requires_grad_"}:
        state.modules[key] = replace(module, idle=False)
    return Value(kind="module", ref=key) if word in SAME_MODULE else None


def make_optimizer(node: ast.Call, state: State, frame: Frame) -> Value | None:
    """Value of a call that makes an optimizer of the modules named in it; None for other calls."""
    full, word = frame.definitions.full_name(node.func), frame.definitions.called_name(node)
    if "lr_scheduler" in full or "sched" in word.lower() or word.endswith(("LR", "Scheduler")):
        return Value(kind="scheduler")
    if not (full.startswith("torch.optim.") or (_OPTIMIZERS.search(word) and not _STEPS.search(word))):
        return None
    parts = (part for part in ast.walk(node) if isinstance(part, ast.Attribute | ast.Name) and part is not node.func)
    values = [state.values.get(text_of(part), UNKNOWN) for part in parts]
    held = [value.ref for value in values if value.kind in {"module", "parameters"}]
    for key in held:
        state.modules[key] = replace(state.module(key), trained=True)
    made = Value(kind="optimizer", ref=tuple(held), tag="torch" if full.startswith("torch.optim.") else "")
    if held and frame.is_lightning:  # the step is in its Trainer
        check_trained(made, state, frame)
    return made


def check_trained(optimizer: Value, state: State, frame: Frame) -> None:
    """LP101, LP106: an optimizer updates 16-bit weights."""
    held = optimizer.ref if optimizer.kind == "optimizer" and isinstance(optimizer.ref, tuple) else ()
    visible = [(text, value.ref) for text, value in state.values.items() if value.kind == "module"]
    for key in held or [key for text, key in visible if named_like_model(text)]:
        module = state.module(key)
        if module.cast is None or (module.idle and not module.trained) or frame.definitions.has_masters:
            continue
        if module.precision == FLOAT16 or (module.precision in LOWS and held and optimizer.tag == "torch"):
            what = "the default type" if module.cast is state.default else "the weights"
            text = ast.unparse(module.cast)
            brief = text if len(text) <= 80 else text[:77] + "..."
            severity = None if module.precision == FLOAT16 else WARNING  # other optimizers may round stochastically
            frame.report("LP101", module.cast, f"{brief}: {what} of a model that is trained", severity)
        _check_batch_norm(module, frame)


def check_unused(state: State, frame: Frame) -> list[tuple[str, str]]:
    """Report notes for models that the file casts to 16 bits, if it neither trains nor evaluates them.

    Returns: (class, precision) of each 16-bit model whose class is in this file.
    """
    found = []
    for module in state.modules.values():
        if module.cast is None or module.precision is None or module.idle:
            continue
        if module.name not in frame.definitions.bases:
            continue
        found.append((module.name, module.precision))
        if not frame.definitions.trains:
            _check_batch_norm(module, frame, NOTE)
    return found


def _check_batch_norm(module: Module, frame: Frame, severity: str | None = None) -> None:
    assert module.cast is not None
    definitions = frame.definitions
    words = (word for one in definitions.classes_within(module.name) for word in definitions.parts.get(one, ()))
    if module.name in definitions.bases and any("BatchNorm" in word for word in words):
        frame.report("LP106", module.cast, f"BatchNorm of {module.name} in {module.precision}", severity)
