"""check=auto_diff: the model in FP32 against itself in low precision."""

import json

import torch

from models.numerics.diff.low_precision import CAST
from models.numerics.diff.model_diff import auto_diff
from models.numerics.diff.summary import COLUMNS, notes_of, rows_of, to_json
from stages.contracts.job import Table
from stages.diagnose.request import Request
from stages.diagnose.subject import load_model, load_sample
from stages.plots.precision import draw_diff


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
