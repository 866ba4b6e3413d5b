"""diagnose: one check of numerical health, on the dense model, a checkpoint, a tensor or training code."""

from models.config import ModelConfig
from stages.contracts.job import Job, Table
from stages.data.config import DataConfig
from stages.diagnose.analyze_tensor import analyze_tensors
from stages.diagnose.auto_diff import diff_model
from stages.diagnose.config import DiagnoseConfig
from stages.diagnose.request import Request
from stages.diagnose.static_check import check_code
from stages.diagnose.watch import watch_passes

# By name of the check, as in stages/diagnose/config.py.
_CHECKS = {
    "auto_diff": diff_model,
    "analyze_tensor": analyze_tensors,
    "static_check": check_code,
    "watch": watch_passes,
}


def run(job: Job, *, model: ModelConfig, data: DataConfig, check: str, diagnose: DiagnoseConfig, seed: int) -> Table:
    """Write what the check found into `out`, as JSON and pictures; its table is the result."""
    return _CHECKS[check](Request(job, model, data, diagnose, seed))
