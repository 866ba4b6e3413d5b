"""A checkpoint to train, and how it is written again."""

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import models.tiny_onn.register  # noqa: F401 - transformers then knows the project's own class
from models.families.companions import copy_companions


def load_trainable(folder: Path) -> PreTrainedModel:
    """The MoE in float32, with the kernels whose backward pass does not grow with the square of E."""
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, experts_implementation="grouped_mm"
    )
    return loaded


def write_native(model: PreTrainedModel, like: Path, folder: Path, dtype: torch.dtype) -> None:
    """Weights in `dtype` and in the names of `like`, with its config.json, tokenizer and code.

    transformers writes a config.json that version 4 of it misreads; that of `like` says the same to both.
    """
    model.to(dtype).save_pretrained(folder)
    for path in like.iterdir():
        if path.suffix in {".json", ".py"} and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    copy_companions(like, folder)
