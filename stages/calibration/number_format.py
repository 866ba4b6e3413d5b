"""Compares a written checkpoint with itself in float32, the format in which a stage fits and measures."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

import models.tiny_onn.register  # noqa: F401 - transformers then knows the project's own class
from instruments.errors import NumericsError
from models.loading import load_whole, release_freed_memory
from stages.artifacts.rendering import in_mib
from stages.calibration.token_memory import free_memory
from stages.losses import measure_loss
from stages.text.batches import TokenBatch

logger = logging.getLogger(__name__)

MOST_TOKENS = 1024
LARGEST_LOSS = 0.05  # nats


def check_number_format(checkpoint: Path, text: Sequence[TokenBatch], device: torch.device) -> None:
    """Measure the loss of the last batch of text in the checkpoint's own number format and in float32.

    Memory: the whole model in float32; without room for it, a warning.
    Raises NumericsError: the loss is not finite, or more than 0.05 nats higher in the checkpoint's format.
    """
    stored = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    free = free_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if free is not None and 3 * stored > free:
        message = "the checkpoint was not compared with itself in float32: that takes %s of memory, %s are free"
        logger.warning(message, in_mib(3 * stored), in_mib(free))
        return
    model = load_whole(checkpoint, dtype="auto", experts_implementation="grouped_mm", device_map={"": device})
    dtype = model.dtype
    if dtype != torch.float32:
        batch = text[-1].rows(max(1, MOST_TOKENS // text[-1].input_ids.shape[1]))
        ours, exact = measure_loss(model, [batch]).nats, measure_loss(model.float(), [batch]).nats
        name = str(dtype).removeprefix("torch.")
        if not ours - exact <= LARGEST_LOSS:  # also if it is not a number
            other = "bfloat16" if dtype == torch.float16 else "float32"
            raise NumericsError(
                f"the checkpoint in {name} has a loss of {ours:.4f}, in float32 of {exact:.4f}: it must not be more "
                f"than {LARGEST_LOSS} higher",
                where=f"{batch.tokens} tokens of the calibration text",
                do=f"assemble.dtype={other}" if name != "bfloat16" else "assemble.dtype=float32",
            )
    del model
    release_freed_memory()
