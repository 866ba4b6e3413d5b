"""Compares a written checkpoint with itself in float32, the format in which a stage fits and measures."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

import models.tiny_onn.register  # noqa: F401 - transformers then knows the project's own class
from instruments.errors import NumericsError
from models.loading import load_whole, release_freed_memory
from stages.artifacts.rendering import in_mib
from stages.calibration.batches import text_sources
from stages.calibration.share import split_validation
from stages.calibration.token_memory import free_memory
from stages.losses import measure_loss
from stages.text.batches import TokenBatch, split_batch

logger = logging.getLogger(__name__)

MOST_TOKENS = 512
MOST_NATS = 0.05


def check_number_format(
    checkpoint: Path, dtype: torch.dtype, text: Sequence[TokenBatch], device: torch.device, share: float = 0.125
) -> None:
    """Measure the loss on a batch of validation text in the checkpoint's own number format, `dtype`, and in float32.

    `share` is the validation split's. Memory: the whole model in float32; without room for it, a warning.
    Raises NumericsError: a loss is not finite, or it is more than 0.05 nats higher in the checkpoint's format.
    """
    if dtype == torch.float32:
        return
    stored = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    free = free_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if free is not None and 3 * stored > free:
        message = "the checkpoint was not compared with itself in float32: that takes %s of memory, %s are free"
        logger.warning(message, in_mib(3 * stored), in_mib(free))
        return
    _fitted, validation = split_validation(len(text), share, text_sources(text))
    batch = split_batch(text[validation[-1]], MOST_TOKENS)[0]
    model = load_whole(checkpoint, dtype=dtype, experts_implementation="grouped_mm", device_map={"": device})
    ours, exact = measure_loss(model, [batch]).nats, measure_loss(model.float(), [batch]).nats
    del model
    release_freed_memory()
    name, place = str(dtype).removeprefix("torch."), f"{batch.tokens} tokens of validation text"
    if not exact < float("inf"):
        what, do = f"the carved model has a loss of {exact}", "check the dense model's weights and text"
        raise NumericsError(what, where=place, do=f"{do}: stage=evaluate shows its loss")
    if not ours - exact <= MOST_NATS:  # also if it is not a number
        what = f"the checkpoint has a loss of {ours:.4f} in {name} and of {exact:.4f} in float32"
        wider = "bfloat16" if dtype == torch.float16 else "float32"
        raise NumericsError(what, where=place, do=f"assemble.dtype={wider}")
