"""diagnose: one check of numerical health, on the dense model, a checkpoint, a tensor or training code."""

import json

import torch

from instruments.precision.findings import COLUMNS, notes_of, rows_of, to_json
from instruments.precision.model_diff import auto_diff
from instruments.precision.plot import draw_diff
from instruments.precision.session import CAST
from instruments.static_check.check import static_check
from models.config import ModelConfig
from stages.artifacts.job import Job, Table
from stages.diagnose.analyze_tensor import analyze_tensors
from stages.diagnose.config import DiagnoseConfig
from stages.diagnose.subject import Request, load_model, load_sample
from stages.diagnose.watch import watch_passes
from stages.text.config import DataConfig


def check_code(request: Request) -> Table:
    """Write `static_check.json`; the table has a row for every finding."""
    settings = request.settings.static_check
    report = static_check(settings.paths, device=settings.device)
    records = [finding.record() for finding in report.findings]
    (request.job.out / "static_check.json").write_text(json.dumps(records, indent=1) + "\n")
    rows = [(f"{one.path}:{one.line}", one.code, one.severity, one.message) for one in report.findings]
    title = f"{report.files:,} files checked, {len(rows):,} findings"
    return Table(title, ("where", "rule", "severity", "what"), rows)


def diff_model(request: Request) -> Table:
    """Write `auto_diff.json` and `auto_diff.png`; the table shows the worst."""
    settings = request.settings.auto_diff
    reference = load_model(request, torch.float32)
    low = load_model(request, getattr(torch, settings.precision)) if settings.mode == CAST else None
    diff = auto_diff(
        reference, load_sample(request, reference), precision=settings.precision, mode=settings.mode, low=low,
        modules=settings.modules, memory_mib=settings.memory_mib, seed=request.seed,
    )  # fmt: skip
    (request.job.out / "auto_diff.json").write_text(json.dumps(to_json(diff), indent=1) + "\n")
    draw_diff(diff, request.job.out / "auto_diff.png")
    return Table(f"FP32 against {diff.precision} ({diff.mode}): {diff.verdict}", COLUMNS, rows_of(diff), notes_of(diff))


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
