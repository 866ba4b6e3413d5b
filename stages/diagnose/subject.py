"""The model under diagnosis, and its input text."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import models.tiny_onn.register  # noqa: F401 - transformers then knows the project's own class
from instruments.errors import CheckpointError
from models.config import ModelConfig
from models.loading import input_device, load_tokenizer, load_whole, padding_id, placement, resolve_device
from models.source import resolve_folder
from stages.artifacts.job import Job
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
        raise CheckpointError(
            f"the tokenizer has {len(tokenizer)} tokens, the checkpoint {known}",
            where=f"{folder}, diagnose.checkpoint={request.settings.checkpoint}",
            do="put the checkpoint's own tokenizer files beside its config.json, or diagnose.checkpoint=null",
        )
    return tokenizer
