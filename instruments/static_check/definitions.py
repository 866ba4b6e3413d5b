"""What a file defines: functions, classes, and what names are bound to, wherever in the file that happens."""

import ast
import hashlib
import json
import os
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path

LOSSES = frozenset({
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "nll_loss", "mse_loss", "l1_loss",
    "smooth_l1_loss", "huber_loss", "kl_div",
})  # fmt: skip
SOFTMAXES = frozenset({"softmax", "log_softmax", "softmin"})
REDUCTIONS = frozenset({
    "sum", "mean", "var", "std", "norm", "vector_norm", "prod", "cumsum", "cumprod", "logsumexp",
})  # fmt: skip
PRODUCTS = frozenset({"linear", "matmul", "bmm", "einsum"})
KNOWN = LOSSES | SOFTMAXES | REDUCTIONS | PRODUCTS | {"pow", "square", "exp", "log", "rsqrt", "sigmoid", "layer_norm"}
# Losses as modules.
LOSS_MODULES = {
    "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "CrossEntropyLoss": "cross_entropy",
    "NLLLoss": "nll_loss",
    "MSELoss": "mse_loss",
    "L1Loss": "l1_loss",
    "SmoothL1Loss": "smooth_l1_loss",
    "HuberLoss": "huber_loss",
    "KLDivLoss": "kl_div",
}


@cache
def autocast_table(device: str) -> dict[str, str]:
    """What becomes of each operation: lowered, float32, kept or refused.

    torch is only imported where its version has not been asked before. Raises ConfigError: no autocast for the device.
    """
    path = _cache_folder() / f"autocast-{_identity()}-{device}.json"
    try:
        table: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        from instruments.static_check.probe import probe_autocast  # noqa: PLC0415 - it loads torch

        table = probe_autocast(device)
        _keep(path, table)
    return table


def _keep(path: Path, table: dict[str, str]) -> None:
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(table), encoding="utf-8")
        new.replace(path)
    except OSError:
        return  # it is probed again the next time


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiny-onn"


def _identity() -> str:
    """Of torch and of what it is asked."""
    probe = Path(__file__).with_name("probe.py").read_bytes()
    return f"{version('torch')}-{hashlib.sha256(probe).hexdigest()[:12]}"


# Where torch's parts are also reached.
_SAME = {
    "torch.nn.functional.": ("torch.functional.",),
    "torch.amp.autocast": (
        "torch.autocast", "torch.cuda.amp.autocast", "torch.cpu.amp.autocast", "torch.amp.autocast_mode.autocast",
        "torch.cuda.amp.autocast_mode.autocast",
    ),
    "torch.amp.GradScaler": (
        "torch.GradScaler", "torch.cuda.amp.GradScaler", "torch.cpu.amp.GradScaler", "torch.amp.grad_scaler.GradScaler",
    ),
}  # fmt: skip


def find_imports(tree: ast.Module) -> dict[str, str]:
    """Local name → dotted name, of every import anywhere in the file."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return names


def text_of(node: ast.expr) -> str | None:
    """`a.b.c` of names and attributes; None of anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


def dotted_name(node: ast.expr, imports: dict[str, str]) -> str | None:
    """The full name of an imported thing; None of what was not imported."""
    text = text_of(node)
    if text is None:
        return None
    head, dot, rest = text.partition(".")
    if head not in imports:
        return None
    full = imports[head] + dot + rest
    for name, others in _SAME.items():
        if full in others:
            return name
    return full


def last_word(text: str | None) -> str:
    """The part after the last dot."""
    return (text or "").rpartition(".")[2]


FLOAT16, BFLOAT16, LOW = "float16", "bfloat16", "low"  # LOW: one of the two
_DTYPES = {"float16": FLOAT16, "half": FLOAT16, "bfloat16": BFLOAT16, "float32": "float32", "float": "float32"}
_DEFAULTS = {"cuda": FLOAT16, "cpu": BFLOAT16}
_MANAGED = {"autocast", "compute_loss_context_manager", "autocast_smart_context_manager"}


@dataclass(frozen=True)
class Region:
    """Autocast, on or off."""

    enabled: bool = True
    device: str | None = None  # None: not said in the file
    dtype: str = LOW
    certain: bool = True  # False: whether it is on is decided at run time


def read_region(node: ast.expr, imports: dict[str, str]) -> Region | None:
    """The region that an expression opens; None where it is no autocast."""
    if isinstance(node, ast.IfExp):  # autocast(...) if use_amp else nullcontext()
        return read_region(node.body, imports) or read_region(node.orelse, imports)
    call = node if isinstance(node, ast.Call) else None
    callee = call.func if call else node
    full = dotted_name(callee, imports) or ""
    arguments = {word.arg: word.value for word in call.keywords} if call else {}
    first = call.args[0] if call and call.args else arguments.get("device_type")
    if full == "torch.amp.autocast":
        written = text_of(callee) or ""
        origin = imports.get(written.partition(".")[0], "") + "." + written
        device = next((kind for kind in ("cuda", "cpu") if f"{kind}.amp" in origin), None)
        enabled = arguments.get("enabled")
        if device is not None:  # torch.cuda.amp.autocast(enabled, dtype)
            enabled = first or enabled
        elif isinstance(first, ast.Constant) and isinstance(first.value, str):
            device = first.value.partition(":")[0]
        off = isinstance(enabled, ast.Constant) and enabled.value is False
        given = arguments.get("dtype")
        return Region(not off, device, (read_dtype(given) or LOW) if given else _DEFAULTS.get(device or "", LOW))
    if call and last_word(text_of(callee)) in _MANAGED:
        return Region(certain=False)  # of accelerate, Lightning Fabric, transformers' Trainer: mixed_precision decides
    return None


def read_dtype(node: ast.expr) -> str | None:
    """float16, bfloat16 or float32 from `torch.float16` and the like; None of anything else."""
    word = node.value if isinstance(node, ast.Constant) else last_word(text_of(node))
    return _DTYPES.get(word) if isinstance(word, str) else None


Function = ast.FunctionDef | ast.AsyncFunctionDef
# They give back the module they are called on, or given.
_SAME_MODULE = {"to", "cuda", "cpu", "half", "bfloat16", "float", "train", "eval", "requires_grad_", "compile"}
_WRAPPERS = {"compile", "DataParallel", "DistributedDataParallel", "DDP", "FSDP", "FullyShardedDataParallel"}
_MODEL_NAMES = {
    "model", "net", "network", "unet", "vae", "encoder", "decoder", "transformer", "backbone", "generator",
    "discriminator",
}  # fmt: skip


@dataclass
class Definitions:
    """Of one file."""

    imports: dict[str, str]
    functions: dict[str, Function] = field(default_factory=dict)  # by name, methods as Class.name
    bases: dict[str, list[str]] = field(default_factory=dict)
    made_by: dict[str, ast.Call] = field(default_factory=dict)  # text of a target → the call it was bound to
    regions: dict[str, Region] = field(default_factory=dict)
    called: dict[str, set[str]] = field(default_factory=dict)  # text of an object → methods called on it
    trains: bool = False  # backward is called somewhere
    autocasts: bool = False

    @cached_property
    def scales(self) -> bool:
        """Whether anything here is a GradScaler."""
        return any("scaler" in last_word(text).lower() for text in [*self.made_by, *self.called, *self.imports])

    @property
    def mixes_precision(self) -> bool:
        """Whether autocast or a GradScaler is at work."""
        return self.scales or self.autocasts

    def updates(self, scaler: ast.expr) -> bool:
        """Whether `update` is called on a scaler of that name anywhere in the file."""
        word = last_word(text_of(scaler))
        return any(last_word(text) == word and "update" in calls for text, calls in self.called.items())

    def class_of(self, text: str) -> str | None:
        """The class in this file whose instance a name is."""
        call = self.made_by.get(text)
        name = text_of(_unwrap(call, self).func) if call else None
        return name if name in self.bases else None

    def loss_of(self, text: str) -> str | None:
        """The loss that a name is a module of."""
        call = self.made_by.get(text)
        full = dotted_name(call.func, self.imports) or "" if call else ""
        return LOSS_MODULES.get(last_word(full)) if full.startswith("torch.nn.") else None

    def is_scaler(self, node: ast.expr) -> bool:
        """A GradScaler, by how it was made or by its name."""
        text = text_of(node)
        if text is None:
            return False
        call = self.made_by.get(text)
        made = (dotted_name(call.func, self.imports) or text_of(call.func) or "") if call else ""
        return made.endswith("GradScaler") or "scaler" in last_word(text).lower()

    def is_optimizer(self, node: ast.expr) -> bool:
        """An optimizer, by how it was made or by its name."""
        text = text_of(node) or ""
        call = self.made_by.get(text)
        made = (dotted_name(call.func, self.imports) or "") if call else ""
        word = last_word(text).lower()
        return made.startswith("torch.optim.") or "optim" in word or word == "opt"

    def is_model(self, node: ast.expr) -> bool:
        """A module that could be trained, by how it was made or by its name."""
        text = text_of(node)
        if text is None or self._is_frozen(text):
            return False
        call = self.made_by.get(text)
        made = last_word(text_of(_unwrap(call, self).func)) if call else ""
        if made in self.bases:
            return self.is_module(made)
        word = last_word(text).lower()
        return made == "from_pretrained" or word in _MODEL_NAMES or word.endswith(("_model", "_net"))

    def _is_frozen(self, text: str) -> bool:
        calls = self.called.get(text, set())
        return "requires_grad_(False)" in calls or ("eval" in calls and "train" not in calls)

    def is_module(self, name: str) -> bool:
        """Whether a class of this file is an nn.Module."""
        return any(
            last_word(base).endswith("Module") or self.is_module(base)
            for base in self.bases.get(name, [])
            if base != name
        )

    def method(self, class_name: str, name: str) -> Function | None:
        """Of the class or one of its bases in this file."""
        seen: set[str] = set()
        waiting = [class_name]
        while waiting:
            one = waiting.pop(0)
            if one in seen:
                continue
            seen.add(one)
            if f"{one}.{name}" in self.functions:
                return self.functions[f"{one}.{name}"]
            waiting += self.bases.get(one, [])
        return None


def find_definitions(tree: ast.Module) -> Definitions:
    """Everything, in one pass over the tree."""
    found = Definitions(find_imports(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.autocasts |= node.id == "autocast"
        elif isinstance(node, ast.ClassDef):
            found.bases[node.name] = [text for base in node.bases if (text := text_of(base))]
            methods = [part for part in node.body if isinstance(part, Function)]
            found.functions.update({f"{node.name}.{method.name}": method for method in methods})
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            _bind(node, found)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found.autocasts |= "autocast" in node.func.attr
            _note_call(node, node.func, found)
    owned = {id(method) for name, method in found.functions.items() if "." in name}
    for node in ast.walk(tree):
        if isinstance(node, Function) and id(node) not in owned:
            found.functions.setdefault(node.name, node)
    return found


def _bind(node: ast.Assign | ast.AnnAssign | ast.NamedExpr, found: Definitions) -> None:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in targets:
        text = text_of(target)
        if text is None or node.value is None:
            continue
        region = read_region(node.value, found.imports)
        if region is not None:
            found.regions[text] = region
        elif isinstance(node.value, ast.Call) and not _wraps(node.value, text):
            found.made_by[text] = node.value


def _note_call(node: ast.Call, func: ast.Attribute, found: Definitions) -> None:
    found.trains |= func.attr in {"backward", "manual_backward"}
    text = text_of(func.value)
    if text is not None:
        first = node.args[0] if node.args else None
        stops = func.attr == "requires_grad_" and isinstance(first, ast.Constant) and first.value is False
        found.called.setdefault(text, set()).add("requires_grad_(False)" if stops else func.attr)


def _wraps(call: ast.Call, text: str) -> bool:
    """`x = x.to(device)`, `x = DDP(x)`: what x was before says more."""
    inner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return text in {text_of(part) for part in [inner, *call.args[:1]] if part is not None}


def _unwrap(call: ast.Call, found: Definitions) -> ast.Call:
    """The call that makes the module, below `.to(device)`, `torch.compile(...)` and the like."""
    for _ in range(8):  # names may be bound to each other in circles
        inner: ast.expr | None = None
        if isinstance(call.func, ast.Attribute) and call.func.attr in _SAME_MODULE:
            inner = call.func.value
        if not isinstance(inner, ast.Call) and last_word(text_of(call.func)) in _WRAPPERS and call.args:
            inner = call.args[0]
        if isinstance(inner, ast.expr) and not isinstance(inner, ast.Call):
            inner = found.made_by.get(text_of(inner) or "")
        if not isinstance(inner, ast.Call):
            break
        call = inner
    return call
