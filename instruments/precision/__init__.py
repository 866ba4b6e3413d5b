"""Find low-precision faults in models, tensors and training code; each tool can be used alone."""

from importlib import import_module
from typing import Any

# Imported on first access: static_check needs no torch.
_PLACES = {
    "analyze_tensor": "instruments.precision.tensor_analysis",
    "auto_diff": "instruments.precision.model_diff",
    "check_loss_scale": "instruments.training_watch.verdict",
    "static_check": "instruments.static_check.check",
    "watch_model": "instruments.training_watch.model_watch",
    "WatchCallback": "instruments.training_watch.trainer_callback",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a function or class
    """Import a function or class on first access."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
