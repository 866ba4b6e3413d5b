"""Compares a written checkpoint with itself in float32, the format in which a stage fits and measures."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

import models.tiny_onn.register  # noqa: F401 - transformers then knows the project's own class
from instruments.errors import NumericsError
from models.config import ModelConfig
from models.loading import load_carved, release_freed_memory
from stages.calibration.batches import text_sources
from stages.calibration.share import split_validation
from stages.losses import measure_loss
from stages.text.batches import TokenBatch, split_batch

MOST_TOKENS = 512
MOST_NATS = 0.05


def check_number_format(
    checkpoint: Path,
    dtype: torch.dtype,
    text: Sequence[TokenBatch],
    model: ModelConfig,
    scratch: Path,
    share: float = 0.125,
) -> None:
    """Measure the loss on a batch of validation text in the checkpoint's own number format, `dtype`, and in float32.

    `share` is the validation split's. Memory: the weights in float32; those that do not fit in the memory of the
    devices, or in the limits that `model` sets, are in `scratch`.
    Raises NumericsError: a loss is not finite, or it is more than 0.05 nats higher in the checkpoint's format.
    """
    if dtype == torch.float32:
        return
    _fitted, validation = split_validation(len(text), share, text_sources(text))
    batch = split_batch(text[validation[-1]], MOST_TOKENS)[0]
    placed = replace(model, device_map="sequential" if model.device_map == "none" else model.device_map)
    losses = []
    for kind in (torch.float32, dtype):
        losses.append(measure_loss(load_carved(checkpoint, placed, kind, scratch / f"offloaded-{kind}"), [batch]).nats)
        release_freed_memory()
    exact, ours = losses
    name, place = str(dtype).removeprefix("torch."), f"{batch.tokens} tokens of validation text"
    if not exact < float("inf"):
        what, do = f"the carved model has a loss of {exact}", "check the dense model's weights and text"
        raise NumericsError(what, where=place, do=f"{do}: stage=evaluate shows its loss")
    if not ours - exact <= MOST_NATS:  # also if it is not a number
        what = f"the checkpoint has a loss of {ours:.4f} in {name} and of {exact:.4f} in float32"
        wider = "bfloat16" if dtype == torch.float16 else "float32"
        raise NumericsError(what, where=place, do=f"assemble.dtype={wider}")
