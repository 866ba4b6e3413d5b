"""Carve a Mixture-of-Experts out of a dense language model, and watch any torch model. Imported on first access."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instruments.parameter_scan.scanner import ParameterTensorScanner as ParameterTensorScanner
    from instruments.precision.model_diff import auto_diff as auto_diff
    from instruments.precision.tensor_analysis import analyze_tensor as analyze_tensor
    from instruments.static_check.check import static_check as static_check
    from instruments.tensor_dump.tensor_dump import TensorDump as TensorDump
    from instruments.training_watch.model_watch import watch_model as watch_model
    from instruments.training_watch.verdict import check_loss_scale as check_loss_scale
    from pipeline.api import carve as carve
    from pipeline.api import evaluate as evaluate

# Name → its module. Most instruments need only torch, static_check not even that.
_PLACES = {
    "carve": "pipeline.api",
    "evaluate": "pipeline.api",
    "ParameterTensorScanner": "instruments.parameter_scan.scanner",
    "MscanWriter": "instruments.parameter_scan.writer",
    "read_mscan": "instruments.parameter_scan.reader",
    "TensorDump": "instruments.tensor_dump.tensor_dump",
    "DumpConfig": "instruments.tensor_dump.config",
    "DumpReader": "instruments.tensor_dump.reader",
    "save_attention_tensors": "instruments.tensor_dump.tensor_files",
    "save_linear_tensors": "instruments.tensor_dump.tensor_files",
    "analyze_tensor": "instruments.precision.tensor_analysis",
    "auto_diff": "instruments.precision.model_diff",
    "static_check": "instruments.static_check.check",
    "check_loss_scale": "instruments.training_watch.verdict",
    "watch_model": "instruments.training_watch.model_watch",
    "WatchCallback": "instruments.training_watch.trainer_callback",
}
__all__ = sorted(_PLACES)  # noqa: PLE0605 - a list of names
# A wheel holds our packages in this folder; in a clone they are beside it.
_PREFIX = f"{__name__}." if (Path(__file__).parent / "instruments").is_dir() else ""


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a function or class
    """Import a function or class on first access."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PREFIX + _PLACES[name]), name)


def main() -> None:
    """Run the command `tiny-onn`, which takes the words of `python -m pipeline`."""
    from pipeline.__main__ import leave, main  # noqa: PLC0415 - the instruments load without the pipeline

    leave(main())
