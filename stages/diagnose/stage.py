"""diagnose: one numerical check of the dense model or a checkpoint."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import models.tiny_onn.register  # noqa: F401 - transformers then knows the project's own class
from instruments.errors import CheckpointError, ConfigError, DataError
from instruments.hooks import Call, trace_modules
from instruments.precision import findings, tensor_analysis
from instruments.precision.comparison import find_format
from instruments.precision.model_diff import auto_diff
from instruments.precision.perturbation import CAST
from instruments.tensors import find_tensors
from instruments.training_watch.model_watch import watch_model
from instruments.training_watch.step_log import NOTE, StepReport, count_findings, draw_training_steps, read_step_log
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
    """The first `diagnose.tokens` tokens of the calibration text, as one batch."""
    tokens = request.settings.tokens
    tokenizer = tokenizer_for(request, model)
    data = replace(request.data, tokens=tokens, max_length=min(tokens, request.data.max_length))
    batches = batch_sequences(load_text(data, tokenizer, "calibration").sequences, tokens, padding_id(tokenizer))
    return batches[0].inputs(input_device(model))


def tokenizer_for(request: Request, model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, or the dense model's if the checkpoint has none.

    Raises:
        CheckpointError: there is no tokenizer, or it has more tokens than the model.
    """
    folder = folder_of(request)
    if not any(folder.glob("tokenizer*")):
        folder = resolve_folder(request.model)
    tokenizer = load_tokenizer(folder, trust_remote_code=request.model.trust_remote_code)
    known = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > known:
        what = f"the tokenizer has {len(tokenizer)} tokens, the checkpoint {known}"
        do = "put the checkpoint's own tokenizer files beside its config.json, or diagnose.checkpoint=null"
        raise CheckpointError(what, where=f"{folder}, diagnose.checkpoint={request.settings.checkpoint}", do=do)
    return tokenizer


def watch_passes(request: Request) -> Table:
    """Write `watch.jsonl` and `watch.png`; the table has one row per kind of finding."""
    model = load_model(request, torch.float32).requires_grad_(True).train()
    reports = list(tqdm(run_passes(request, model), total=request.settings.watch.steps, desc="watch", unit="step"))
    log = request.job.out / "watch.jsonl"
    draw_training_steps(read_step_log(log), request.job.out / "watch.png")
    return summarise(reports, request.settings.watch.precision)


def run_passes(request: Request, model: PreTrainedModel) -> Iterator[StepReport]:
    """Run the passes; yield the report of each."""
    settings, device = request.settings.watch, input_device(model)
    optimizer = torch.optim.SGD(model.parameters())  # the scaler needs one; it makes no step
    low = None if settings.precision in {"float32", "fp32"} else find_format(settings.precision)
    scaler = GradScaler(device.type, enabled=low is torch.float16)
    log = request.job.out / "watch.jsonl"
    with watch_model(model, scaler=scaler, config=settings.limits, log=log) as watch:
        for ids in read_batches(request, model):
            model.zero_grad(set_to_none=True)
            with torch.autocast(device.type, low, enabled=low is not None):
                loss = model(input_ids=ids.to(device), labels=ids.to(device), use_cache=False).loss
            scaler.scale(loss).backward()
            yield watch.step(loss=loss)
            scaler.unscale_(optimizer)
            scaler.update()


def read_batches(request: Request, model: PreTrainedModel) -> Iterator[torch.Tensor]:
    """Token ids of the first sequences, (1, T) each, repeated if there are too few. Raises DataError."""
    found = load_text(request.data, tokenizer_for(request, model), "calibration").sequences
    usable = [sequence for sequence in found if len(sequence.ids) > 1]
    if not usable:
        raise DataError("no sequence has two tokens", where="check=watch", do="choose a longer text: data.path=")
    for step in range(request.settings.watch.steps):
        ids = usable[step % len(usable)].ids[: request.settings.tokens]
        yield torch.as_tensor(ids, dtype=torch.long)[None]


def summarise(reports: Sequence[StepReport], precision: str) -> Table:
    """One row per kind of finding; ranges of gradient norms in the notes."""
    rows = count_findings([report.record(layers=False) for report in reports])
    norms = [report.gradient_norm for report in reports]
    ordered = sorted(reports[-1].layers.items(), key=lambda item: item[1])
    weakest, strongest = (f"{name} ({norm:.2g})" for name, norm in (ordered[0], ordered[-1]))
    notes = [
        f"gradient norm {min(norms):.3g} to {max(norms):.3g}",
        f"in the last step: weakest layer {weakest}, strongest {strongest}",
    ]
    bad = sum(severity != NOTE for _kind, severity, _count, _step, _message in rows)
    title = f"{len(reports)} passes in {precision}: {f'{bad} kinds of findings' if bad else 'ok'}"
    return Table(title, ("finding", "severity", "steps", "first", "what"), rows, notes)


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


_MOST_PICTURES = 12


def analyze_tensors(request: Request) -> Table:
    """Write `analyze_tensor.json` and pictures of the first tensors."""
    asked = request.settings.analyze_tensor
    found, notes = [], []
    for name, tensor in read_activations(request, asked.modules).items():
        if tensor.is_floating_point() and tensor.layout is torch.strided:
            scale = None if asked.scale == "none" else asked.scale
            found.append(tensor_analysis.analyze_tensor(tensor, asked.formats, scale=scale, name=name))
        else:
            notes.append(f"{name} holds {str(tensor.dtype).removeprefix('torch.')}: not analysed")
    (request.job.out / "analyze_tensor.json").write_text(json.dumps(tensor_analysis.to_json(found), indent=1) + "\n")
    for number, one in enumerate(found[:_MOST_PICTURES]):
        tensor_analysis.draw_tensor(one, request.job.out / f"tensor_{number:02}.png")
    if len(found) > _MOST_PICTURES:
        notes.append(f"pictures of the first {_MOST_PICTURES} of {len(found)} tensors")
    rows, notes = tensor_analysis.rows_of(found), [*tensor_analysis.notes_of(found), *notes]
    return Table("What tensors lose in low precision", tensor_analysis.COLUMNS, rows, notes)


# Value of `check` → function.
_CHECKS = {
    "auto_diff": diff_model,
    "analyze_tensor": analyze_tensors,
    "watch": watch_passes,
}


def run(job: Job, *, model: ModelConfig, data: DataConfig, check: str, diagnose: DiagnoseConfig, seed: int) -> Table:
    """Run one check; write its findings into `out` as JSON and pictures."""
    return _CHECKS[check](Request(job, model, data, diagnose, seed))
