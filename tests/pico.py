"""Tiny random dense checkpoints of every family, for tests."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from models.source import EMBEDDED

# Families whose heads are as wide as hidden / heads, in one of transformers' generations or in their MoE.
_DERIVED_HEAD_DIM = {"qwen2", "granite", "phi3"}


def write_pico(
    folder: Path,
    model_type: str,
    *,
    layers: int = 2,
    hidden: int = 24,
    intermediate: int = 40,
    vocab: int = 61,
    seed: int = 0,
    tie: bool = False,
    dtype: torch.dtype = torch.float32,
    tokenizer: bool = False,
    max_shard_size: str = "5GB",
    **config: Any,
) -> Path:
    """Write a random checkpoint whose logits depend on every weight.

    Args:
        folder: made if it is not there.
        model_type: of a supported family; any causal model of transformers that takes these sizes.
        layers: L.
        hidden: D, a multiple of 4 heads times 2.
        intermediate: F.
        vocab: V; with `tokenizer` it is that of the embedded model.
        seed: of the weights.
        tie: output embedding = input embedding.
        dtype: number format on disk.
        tokenizer: copy the embedded model's tokenizer beside the weights.
        max_shard_size: as `save_pretrained` takes it.
        config: further keys of config.json.
    Returns:
        The folder.
    """
    if tokenizer:
        vocab = AutoConfig.from_pretrained(EMBEDDED, local_files_only=True).vocab_size
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tie,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    if model_type not in _DERIVED_HEAD_DIM:
        # Wider than hidden / heads: whoever derives it instead of reading it fails.
        sizes["head_dim"] = 8
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes | config))
        for parameter in model.parameters():
            _spread(parameter)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer:
        for path in EMBEDDED.glob("*token*"):
            shutil.copyfile(path, folder / path.name)
        shutil.copyfile(EMBEDDED / "chat_template.jinja", folder / "chat_template.jinja")
    return folder


@torch.no_grad()
def _spread(parameter: nn.Parameter) -> None:
    """Weights of neuron gain, norms near 1 and biases off 0, so that nothing cancels and nothing vanishes."""
    if parameter.ndim == 2:
        parameter.normal_(std=parameter.shape[1] ** -0.5)
    else:
        parameter.add_(torch.randn_like(parameter), alpha=0.2)
