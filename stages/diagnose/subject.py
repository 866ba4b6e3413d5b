"""The model that is looked at, and the text it reads."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import models.tiny_onn.register  # noqa: F401 - transformers then knows the project's own class
from models.config import ModelConfig
from models.loading import input_device, load_tokenizer, placement, resolve_device
from models.source import resolve_folder
from stages.artifacts.job import Job
from stages.diagnose.config import DiagnoseConfig
from stages.text.config import DataConfig
from stages.text.sequences import batch_sequences, load_sequences


@dataclass(frozen=True)
class Request:
    """The arguments of every check."""

    job: Job
    model: ModelConfig
    data: DataConfig
    settings: DiagnoseConfig
    seed: int


def folder_of(request: Request) -> Path:
    """Of the checkpoint asked for, or of the dense model."""
    asked = request.settings.checkpoint
    return Path(asked) if asked is not None else resolve_folder(request.model)


def load_model(request: Request, dtype: torch.dtype) -> PreTrainedModel:
    """The model in this number format, as it is loaded for use, in evaluation mode."""
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder_of(request),
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=request.model.trust_remote_code,
        **placement(request.model, resolve_device(request.model)),
    )
    return loaded.requires_grad_(False).eval()


def load_sample(request: Request, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The first so many tokens of the calibration text, as one batch."""
    tokens, device = request.settings.tokens, input_device(model)
    tokenizer = load_tokenizer(resolve_folder(request.model), trust_remote_code=request.model.trust_remote_code)
    data = replace(request.data, tokens=tokens, max_length=min(tokens, request.data.max_length))
    batch = batch_sequences(load_sequences(data, tokenizer, "calibration"), tokens, tokenizer.pad_token_id or 0)[0]
    return {"input_ids": batch.input_ids.to(device), "attention_mask": batch.attention_mask.to(device)}
