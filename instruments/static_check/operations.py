"""What autocast does to an operation, on a kind of device: probed once for each torch, and kept in a file."""

import hashlib
import json
import os
from functools import cache
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
