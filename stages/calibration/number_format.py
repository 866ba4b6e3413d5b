"""Compares a written checkpoint with itself in float32, the format in which a stage fits and measures."""

from collections.abc import Sequence
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch

import models.tiny_onn.register  # noqa: F401 - transformers then knows the project's own class
from instruments.device import free_device_memory
from instruments.errors import NumericsError
from models.config import ModelConfig
from models.loading import load_whole, placement, release_freed_memory, resolve_device
from models.training import LARGE_PRODUCTS
from stages.calibration.batches import text_sources
from stages.calibration.share import split_validation
from stages.calibration.token_memory import free_memory
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

    `share` is the validation split's. Memory: the weights in float32; what does not fit there is in `scratch`.
    Raises NumericsError: a loss is not finite, or it is more than 0.05 nats higher in the checkpoint's format.
    """
    if dtype == torch.float32:
        return
    _fitted, validation = split_validation(len(text), share, text_sources(text))
    batch = split_batch(text[validation[-1]], MOST_TOKENS)[0]
    size, losses = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors")), []
    offloaded = scratch / "offloaded"
    for kind in (torch.float32, dtype):
        arguments = placed(model, size * kind.itemsize // dtype.itemsize) | {"offload_folder": offloaded}
        loaded = load_whole(checkpoint, dtype=kind, experts_implementation=LARGE_PRODUCTS, **arguments)
        losses.append(measure_loss(loaded, [batch]).nats)
        del loaded
        release_freed_memory()
        rmtree(offloaded, ignore_errors=True)
    exact, ours = losses
    name, place = str(dtype).removeprefix("torch."), f"{batch.tokens} tokens of validation text"
    if not exact < float("inf"):
        what, do = f"the carved model has a loss of {exact}", "check the dense model's weights and text"
        raise NumericsError(what, where=place, do=f"{do}: stage=evaluate shows its loss")
    if not ours - exact <= MOST_NATS:  # also if it is not a number
        what = f"the checkpoint has a loss of {ours:.4f} in {name} and of {exact:.4f} in float32"
        wider = "bfloat16" if dtype == torch.float16 else "float32"
        raise NumericsError(what, where=place, do=f"assemble.dtype={wider}")


ROOM = 0.8  # of the free memory; the rest is for activations


def placed(model: ModelConfig, size: int) -> dict[str, Any]:
    """Placement of `size` bytes of weights: as `model` says, or on its device, as much as fits there."""
    device, host = resolve_device(model), free_memory()
    room = host if device.type == "cpu" else free_device_memory(device)
    if model.device_map != "none" or room is None or host is None or size < ROOM * room:
        return placement(model, device)
    limits: dict[int | str, int] = {"cpu": int(ROOM * host)}
    limits |= {} if device.type == "cpu" else {device.index or 0: int(ROOM * room)}
    return {"device_map": "sequential", "max_memory": limits}
