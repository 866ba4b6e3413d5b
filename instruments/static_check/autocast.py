"""Effect of autocast on each operation, and names of torch functions in code."""

import ast
import hashlib
import json
import os
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

from instruments.files import write_json

# Loss module → loss function.
LOSS_MODULES = {
    "BCELoss": "binary_cross_entropy", "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "CrossEntropyLoss": "cross_entropy", "NLLLoss": "nll_loss", "KLDivLoss": "kl_div", "MSELoss": "mse_loss",
    "L1Loss": "l1_loss", "SmoothL1Loss": "smooth_l1_loss", "HuberLoss": "huber_loss",
}  # fmt: skip
LOSSES = frozenset(LOSS_MODULES.values())
ACTIVATIONS = {"Softmax": "softmax", "LogSoftmax": "log_softmax", "Sigmoid": "sigmoid"}
SOFTMAXES = frozenset({"softmax", "log_softmax", "softmin"})
REDUCTIONS = frozenset({
    "sum", "mean", "var", "std", "norm", "vector_norm", "prod", "cumsum", "cumprod", "logsumexp",
})  # fmt: skip
PRODUCTS = frozenset({"linear", "matmul", "bmm", "einsum"})
NORMS = frozenset({"layer_norm", "batch_norm", "group_norm"})
KNOWN = (
    LOSSES | SOFTMAXES | REDUCTIONS | PRODUCTS | NORMS
    | {"pow", "square", "exp", "log", "log1p", "rsqrt", "sigmoid", "max", "amax"}
)  # fmt: skip


@cache
def autocast_table(device: str) -> dict[str, str]:
    """Effect of autocast on each operation: lowered, float32, kept or refused.

    Cached on disk by torch version, so torch is imported once only. Raises ConfigError: no autocast for the device.
    """
    probe = hashlib.sha256(Path(__file__).with_name("probe.py").read_bytes()).hexdigest()[:12]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiny-onn"
    path = folder / f"autocast-{version('torch')}-{probe}-{device}.json"
    try:
        table: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        from instruments.static_check.probe import probe_autocast  # noqa: PLC0415 - it loads torch

        table = probe_autocast(device)
        with suppress(OSError):  # probed again next time
            folder.mkdir(parents=True, exist_ok=True)
            write_json(path, table)
    return table


FLOAT16, BFLOAT16, LOW, FLOAT32 = "float16", "bfloat16", "low", "float32"  # LOW: one of the 16-bit formats
DTYPES = {
    "float16": FLOAT16, "half": FLOAT16, "fp16": FLOAT16, "bfloat16": BFLOAT16, "bf16": BFLOAT16,
    "float32": FLOAT32, "float": FLOAT32, "float64": FLOAT32, "double": FLOAT32, "fp32": FLOAT32,
}  # fmt: skip
AUTOCASTS = {
    "torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast", "torch.cpu.amp.autocast",
    "torch.amp.autocast_mode.autocast", "torch.cuda.amp.autocast_mode.autocast",
}  # fmt: skip


def text_of(node: ast.expr | None) -> str:
    """`a.b.c` for names and attributes; empty for anything else."""
    if isinstance(node, ast.Attribute):
        head = text_of(node.value)
        return head and f"{head}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def called_name(call: ast.Call) -> str:
    """Last name of the called function: `f` for `f()`, `a.f()` and `a().f()`."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else text_of(call.func)


def last_word(text: str) -> str:
    """The part after the last dot."""
    return text.rpartition(".")[2]
