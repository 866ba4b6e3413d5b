"""Tiny random dense checkpoints of every family, and their description without weights, for tests."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from models.decoder import Decoder
from models.finding import find_decoder
from models.source import EMBEDDED

# Families with head_dim = hidden / heads in transformers 4, in transformers 5 or in their MoE architecture.
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
        folder: created if missing.
        model_type: a supported family, or any causal model of transformers with these configuration keys.
        layers: L.
        hidden: D, a multiple of 8.
        intermediate: F.
        vocab: V; ignored with `tokenizer`, which sets the embedded model's vocabulary size.
        seed: seed of the weights.
        tie: tie the output embedding to the input embedding.
        dtype: number format on disk.
        tokenizer: copy the embedded model's tokenizer into the folder.
        max_shard_size: as in `save_pretrained`.
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
        # Larger than hidden / heads, so that code which derives the width instead of reading it fails.
        sizes["head_dim"] = 8
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # A copy: configurations complete the dicts that they are given.
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes | deepcopy(config)))
        for parameter in model.parameters():
            _spread(parameter)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer:
        for path in EMBEDDED.glob("*token*"):
            shutil.copyfile(path, folder / path.name)
        shutil.copyfile(EMBEDDED / "chat_template.jinja", folder / "chat_template.jinja")
    return folder


def load_frozen(folder: Path) -> PreTrainedModel:
    """The model in fp32, which asks for no gradients."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)


# As in Gemma 4 E2B, FFNs of the last layers, which take keys of earlier ones, are twice as wide.
TWO_WIDTHS = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "sliding_window": 4,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 61, "global_head_dim": 8,
}  # fmt: skip
FAMILIES = (
    "gemma2", "gemma3_text", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3",
)  # fmt: skip
_SIZES = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip


def decoder_of(config: Mapping[str, Any] | str, **more: Any) -> Decoder:
    """The dense decoder that this config.json describes, or a family's; sizes that it leaves out are pico's."""
    given = {"model_type": config} if isinstance(config, str) else config
    return _described(json.dumps({**_SIZES, **given, **more}))


def bare_decoder(config: Mapping[str, Any]) -> Decoder:
    """As `decoder_of`, without any sizes but those of config.json."""
    return _described(json.dumps(config))


def change_config(folder: Path, name: str = "config.json", /, **changes: Any) -> None:
    """Change or add values of a JSON file of a checkpoint."""
    stored = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    (folder / name).write_text(json.dumps(stored | changes))


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, read with safetensors alone."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@contextmanager
def edited_tensors(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """All tensors of a checkpoint, to edit; they are written back as one shard."""
    tensors = tensors_in(folder)
    yield tensors
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@cache
def _described(content: str) -> Decoder:
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(content)
        return find_decoder(Path(folder))


@torch.no_grad()
def _spread(parameter: nn.Parameter) -> None:
    """Matrices of unit gain, norms near 1 and nonzero biases, so that no term cancels or vanishes."""
    if parameter.ndim == 2:
        parameter.normal_(std=parameter.shape[1] ** -0.5)
    else:
        parameter.add_(torch.randn_like(parameter), alpha=0.2)
