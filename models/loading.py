"""The dense model and its tokenizer through transformers: frozen, from local files only."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from models.config import ModelConfig
from models.errors import CheckpointError, ConfigError
from models.families.config import source_dtype
from models.families.fused_modules import separate_fused
from models.placement import placement
from models.quantization import bitsandbytes_config, explained_offload, prepare_quantised, require_bitsandbytes
from models.quantization_rules import stored_quantization
from models.source import read_config

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(model: ModelConfig) -> torch.device:
    """The device asked for; auto takes a GPU where there is one. Raises ConfigError."""
    if model.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(model.device)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {model.device!r}", where="model.device", do="model.device=auto") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {model.device} is not here: {torch.cuda.device_count()} GPUs found",
            where="model.device",
            do="model.device=auto, or model.device=cpu",
        )
    return device


def resolve_dtype(model: ModelConfig, device: torch.device) -> torch.dtype | None:
    """The number format asked for; None stands for the checkpoint's own, which auto takes on a GPU."""
    if model.dtype == "auto":
        # Half precision saves nothing on a CPU that multiplies it slower than float32.
        return torch.float32 if device.type == "cpu" else None
    return _DTYPES[model.dtype]


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer beside a checkpoint. Raises CheckpointError: none is there, or that of another model."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise _no_tokenizer(folder, str(error).splitlines()[0]) from error
    # Where the files are missing some architectures get an empty tokenizer without a word.
    if not tokenizer("text", add_special_tokens=False)["input_ids"]:
        raise _no_tokenizer(folder, "it finds no token in plain text")
    vocabulary = read_config(folder)["vocab_size"]
    if tokenizer.vocab_size > vocabulary:
        raise _no_tokenizer(folder, f"it has {tokenizer.vocab_size} tokens, the model {vocabulary}")
    return tokenizer


def _no_tokenizer(folder: Path, reason: str) -> CheckpointError:
    do = "put the model's tokenizer files beside its config.json"
    return CheckpointError(f"no usable tokenizer: {reason}", where=str(folder), do=do)


def load_dense(model: ModelConfig, folder: Path) -> PreTrainedModel:
    """The dense model, frozen and in evaluation mode; quantised and spread over devices as asked.

    Raises:
        ConfigError: no such device, no usable bitsandbytes, or a quantised model that does not fit on the GPUs.
    """
    device, config = resolve_device(model), read_config(folder)
    dtype, stored = resolve_dtype(model, device), stored_quantization(config)
    arguments = placement(model, device)
    quantization = stored or model.quantization
    if quantization == "none":
        return _load(model, folder, dtype, arguments)
    require_bitsandbytes(quantization)
    compute_dtype = dtype or getattr(torch, source_dtype(config) or "bfloat16")
    if stored is None:
        arguments["quantization_config"] = bitsandbytes_config(quantization, compute_dtype)
    with explained_offload(model):
        dense = _load(model, folder, dtype, arguments)
    prepare_quantised(dense, compute_dtype)
    return dense


def _load(model: ModelConfig, folder: Path, dtype: torch.dtype | None, arguments: dict[str, Any]) -> PreTrainedModel:
    dense: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype or "auto",
        local_files_only=True,
        trust_remote_code=model.trust_remote_code,
        **arguments,
    )
    separate_fused(dense)
    return dense.requires_grad_(False).eval()
