"""Carve a Mixture-of-Experts out of a dense language model, and watch any torch model. Imported on first access."""

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The public names, for type checkers and for `__getattr__`, which reads them in the text of this file. Most instruments
# need only torch, static_check not even that.
if TYPE_CHECKING:
    from instruments.parameter_scan.reader import read_mscan as read_mscan
    from instruments.parameter_scan.scanner import ParameterTensorScanner as ParameterTensorScanner
    from instruments.parameter_scan.writer import MscanWriter as MscanWriter
    from instruments.precision.model_diff import auto_diff as auto_diff
    from instruments.precision.tensor_analysis import analyze_tensor as analyze_tensor
    from instruments.static_check.check import static_check as static_check
    from instruments.tensor_dump.config import DumpConfig as DumpConfig
    from instruments.tensor_dump.reader import DumpReader as DumpReader
    from instruments.tensor_dump.tensor_dump import TensorDump as TensorDump
    from instruments.tensor_dump.tensor_files import save_attention_tensors as save_attention_tensors
    from instruments.tensor_dump.tensor_files import save_linear_tensors as save_linear_tensors
    from instruments.training_watch.model_watch import watch_model as watch_model
    from instruments.training_watch.trainer_callback import WatchCallback as WatchCallback
    from instruments.training_watch.verdict import check_loss_scale as check_loss_scale
    from pipeline.api import carve as carve
    from pipeline.api import evaluate as evaluate

# Name → its module.
_PLACES = {
    line.names[0].asname: line.module
    for line in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    if isinstance(line, ast.ImportFrom) and line.names[0].asname and line.module
}
__all__ = sorted(filter(None, _PLACES))  # noqa: PLE0605 - a list of names


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a function or class
    """Import a function or class on first access."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def main() -> None:
    """Run the command `tiny-onn`, which takes the words of `python -m pipeline`."""
    from pipeline.__main__ import leave, main  # noqa: PLC0415 - the instruments load without the pipeline

    leave(main())
