"""What autocast does: to each operation, and in which blocks of a file."""

import ast
import hashlib
import json
import os
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from instruments.durable import whole_file

# Losses as modules, and as functions.
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
LOSSES = frozenset(LOSS_MODULES.values())
SOFTMAXES = frozenset({"softmax", "log_softmax", "softmin"})
REDUCTIONS = frozenset({
    "sum", "mean", "var", "std", "norm", "vector_norm", "prod", "cumsum", "cumprod", "logsumexp",
})  # fmt: skip
PRODUCTS = frozenset({"linear", "matmul", "bmm", "einsum"})
KNOWN = LOSSES | SOFTMAXES | REDUCTIONS | PRODUCTS | {"pow", "square", "exp", "log", "rsqrt", "sigmoid", "layer_norm"}


@cache
def autocast_table(device: str) -> dict[str, str]:
    """What becomes of each operation: lowered, float32, kept or refused.

    torch is only imported where its version has not been asked before. Raises ConfigError: no autocast for the device.
    """
    probe = hashlib.sha256(Path(__file__).with_name("probe.py").read_bytes()).hexdigest()[:12]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiny-onn"
    path = folder / f"autocast-{version('torch')}-{probe}-{device}.json"
    try:
        table: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        from instruments.static_check.probe import probe_autocast  # noqa: PLC0415 - it loads torch

        table = probe_autocast(device)
        _keep(path, table)
    return table


def _keep(path: Path, table: dict[str, str]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as unfinished:
            unfinished.write_text(json.dumps(table), encoding="utf-8")
    except OSError:
        return  # it is probed again the next time


FLOAT16, BFLOAT16, LOW = "float16", "bfloat16", "low"  # LOW: one of the two
_DTYPES = {"float16": FLOAT16, "half": FLOAT16, "bfloat16": BFLOAT16, "float32": "float32", "float": "float32"}
_DEFAULTS = {"cuda": FLOAT16, "cpu": BFLOAT16}
_MANAGED = {"autocast", "compute_loss_context_manager", "autocast_smart_context_manager"}
# Where torch's parts are also reached.
_ALIASES = dict.fromkeys(
    ("torch.autocast", "torch.cuda.amp.autocast", "torch.cpu.amp.autocast", "torch.amp.autocast_mode.autocast",
     "torch.cuda.amp.autocast_mode.autocast"), "torch.amp.autocast",
) | dict.fromkeys(
    ("torch.GradScaler", "torch.cuda.amp.GradScaler", "torch.cpu.amp.GradScaler", "torch.amp.grad_scaler.GradScaler"),
    "torch.amp.GradScaler",
)  # fmt: skip


def text_of(node: ast.expr) -> str:
    """`a.b.c` of names and attributes; nothing of anything else."""
    if isinstance(node, ast.Attribute):
        head = text_of(node.value)
        return head and f"{head}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def called_name(call: ast.Call) -> str:
    """Of what is called, the name alone: `f` of `f()`, `a.f()` and `a().f()`."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else text_of(call.func)


def last_word(text: str) -> str:
    """The part after the last dot."""
    return text.rpartition(".")[2]


def dotted_name(node: ast.expr, imports: dict[str, str]) -> str:
    """The full name of an imported thing; nothing of what was not imported."""
    head, dot, rest = text_of(node).partition(".")
    full = imports[head] + dot + rest if head in imports else ""
    return _ALIASES.get(full, full)


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
    if dotted_name(callee, imports) != "torch.amp.autocast":
        # Of accelerate, Lightning Fabric, transformers' Trainer: mixed_precision decides.
        return Region(certain=False) if call and last_word(text_of(callee)) in _MANAGED else None
    arguments = {word.arg: word.value for word in call.keywords} if call else {}
    first = call.args[0] if call and call.args else arguments.get("device_type")
    enabled, given = arguments.get("enabled"), arguments.get("dtype")
    written = text_of(callee)
    origin = imports.get(written.partition(".")[0], "") + "." + written
    device = next((kind for kind in ("cuda", "cpu") if f"{kind}.amp" in origin), None)
    if device is not None:  # torch.cuda.amp.autocast(enabled, dtype)
        enabled = first or enabled
    elif isinstance(first, ast.Constant) and isinstance(first.value, str):
        device = first.value.partition(":")[0]
    off = isinstance(enabled, ast.Constant) and enabled.value is False
    return Region(not off, device, (read_dtype(given) or LOW) if given else _DEFAULTS.get(device or "", LOW))


def read_dtype(node: ast.expr) -> str | None:
    """float16, bfloat16 or float32 from `torch.float16` and the like; None of anything else."""
    word = node.value if isinstance(node, ast.Constant) else last_word(text_of(node))
    return _DTYPES.get(word) if isinstance(word, str) else None
