"""diagnose: one numerical check of the dense model or a checkpoint."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import models.tiny_onn.register  # noqa: F401 - transformers then knows the project's own class
from instruments.errors import ConfigError
from instruments.hooks import Call, trace_modules
from instruments.precision import findings, tensor_analysis
from instruments.precision.comparison import find_format
from instruments.precision.model_diff import auto_diff
from instruments.precision.perturbation import CAST
from instruments.tensors import find_tensors
from models.config import ModelConfig
from models.loading import input_device, load_tokenizer, load_whole, padding_id, placement, resolve_device
from models.source import resolve_folder
from stages.artifacts.job import Job, Table
from stages.diagnose.config import DiagnoseConfig
from stages.text.batches import batch_sequences
from stages.text.config import DataConfig
from stages.text.sequences import load_text


@dataclass(frozen=True)
class Request:
    """The arguments of every check."""

    job: Job
    model: ModelConfig
    data: DataConfig
    settings: DiagnoseConfig
    seed: int


def folder_of(request: Request) -> Path:
    """Folder of `diagnose.checkpoint`, or of the dense model without it."""
    asked = request.settings.checkpoint
    return Path(asked) if asked is not None else resolve_folder(request.model)


def load_model(request: Request, dtype: torch.dtype) -> PreTrainedModel:
    """The model in this number format, in evaluation mode."""
    return load_whole(
        folder_of(request),
        dtype=dtype,
        trust_remote_code=request.model.trust_remote_code,
        **placement(request.model, resolve_device(request.model)),
    )


def load_sample(request: Request, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The first `diagnose.tokens` tokens of the calibration text, as one batch.

    Their tokenizer is the checkpoint's, or the dense model's if the checkpoint has none.
    """
    tokens, folder = request.settings.tokens, folder_of(request)
    folder = folder if any(folder.glob("tokenizer*")) else resolve_folder(request.model)
    tokenizer = load_tokenizer(folder, trust_remote_code=request.model.trust_remote_code)
    data = replace(request.data, tokens=tokens, max_length=min(tokens, request.data.max_length))
    batches = batch_sequences(load_text(data, tokenizer, "calibration").sequences, tokens, padding_id(tokenizer))
    return batches[0].inputs(input_device(model))


def diff_model(request: Request) -> Table:
    """Write `auto_diff.json` and `auto_diff.png`; the table shows the worst modules."""
    settings = request.settings.auto_diff
    reference = load_model(request, torch.float32)
    low = load_model(request, find_format(settings.precision)) if settings.mode == CAST else None
    diff = auto_diff(
        reference, load_sample(request, reference), precision=settings.precision, mode=settings.mode, low=low,
        modules=settings.modules, limits=settings.limits, seed=request.seed,
    )  # fmt: skip
    (request.job.out / "auto_diff.json").write_text(json.dumps(findings.to_json(diff), indent=1) + "\n")
    findings.draw_diff(diff, request.job.out / "auto_diff.png")
    title = f"FP32 against {diff.precision} ({diff.mode}): {diff.verdict}"
    return Table(title, findings.COLUMNS, findings.rows_of(diff), findings.notes_of(diff))


@torch.no_grad()
def read_activations(request: Request, patterns: Sequence[str]) -> dict[str, Tensor]:
    """FP32 outputs of the modules whose names match a glob. Raises ConfigError: no module matches."""
    model = load_model(request, torch.float32)
    outputs: dict[str, Tensor] = {}

    def keep(call: Call, _module: nn.Module, output: Any) -> None:  # noqa: ANN401 - any output of a module
        if any(fnmatchcase(call.module, pattern) for pattern in patterns):
            for path, tensor in find_tensors(output).items():
                outputs[f"{call}{path}"] = tensor.to("cpu", copy=True)  # the model may change it later

    with trace_modules(model, keep):
        model(**load_sample(request, model), use_cache=False)
    if not outputs:
        names = [name for name, _ in model.named_modules() if name]
        what = f"no module that ran is called {', '.join(patterns)}"
        do = f"diagnose.analyze_tensor.modules=['{names[-1]}']"
        raise ConfigError(what, where="setting diagnose.analyze_tensor.modules", do=do)
    return outputs


def analyze_tensors(request: Request) -> Table:
    """Write `analyze_tensor.json`; the table has one row per tensor and format."""
    asked = request.settings.analyze_tensor
    found, notes = [], []
    for name, tensor in read_activations(request, asked.modules).items():
        if tensor.is_floating_point() and tensor.layout is torch.strided:
            scale = None if asked.scale == "none" else asked.scale
            found.append(tensor_analysis.analyze_tensor(tensor, asked.formats, scale=scale, name=name))
        else:
            notes.append(f"{name} holds {str(tensor.dtype).removeprefix('torch.')}: not analysed")
    (request.job.out / "analyze_tensor.json").write_text(json.dumps(tensor_analysis.to_json(found), indent=1) + "\n")
    rows, notes = tensor_analysis.rows_of(found), [*tensor_analysis.notes_of(found), *notes]
    return Table("What tensors lose in low precision", tensor_analysis.COLUMNS, rows, notes)


# Value of `check` → function.
_CHECKS = {"auto_diff": diff_model, "analyze_tensor": analyze_tensors}


def run(job: Job, *, model: ModelConfig, data: DataConfig, check: str, diagnose: DiagnoseConfig, seed: int) -> Table:
    """Run one check; write its findings into `out` as JSON and pictures."""
    return _CHECKS[check](Request(job, model, data, diagnose, seed))
