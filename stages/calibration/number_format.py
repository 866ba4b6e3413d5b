"""Compares a written checkpoint with itself in float32, the format in which a stage fits and measures."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

import models.tiny_onn.register  # noqa: F401 - transformers then knows the project's own class
from instruments.device import free_device_memory
from instruments.errors import NumericsError
from models.checkpoint.shards import ShardReader
from models.loading import experts_argument, explained_loading, release_freed_memory
from models.structure import decoder_layers, model_class
from stages.calibration.batches import text_sources
from stages.calibration.share import split_validation
from stages.calibration.token_memory import free_memory
from stages.losses import measure_loss
from stages.text.batches import TokenBatch, split_batch

MOST_TOKENS = 512
MOST_NATS = 0.05


def check_number_format(
    checkpoint: Path, dtype: torch.dtype, text: Sequence[TokenBatch], device: torch.device, share: float = 0.125
) -> None:
    """Measure the loss on a batch of validation text in the checkpoint's own number format, `dtype`, and in float32.

    `share` is the validation split's. Memory: the embeddings and one layer in float32; all layers where there is room.
    Raises NumericsError: a loss is not finite, or it is more than 0.05 nats higher in the checkpoint's format.
    """
    if dtype == torch.float32:
        return
    _fitted, validation = split_validation(len(text), share, text_sources(text))
    batch = split_batch(text[validation[-1]], MOST_TOKENS)[0]
    losses, kept = [], Layers() if has_room(checkpoint, dtype, device) else None
    for kind in (torch.float32, dtype):
        with open_by_layers(checkpoint, kind, device, kept) as model:
            losses.append(measure_loss(model, [batch]).nats)
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


Layers = dict[int, dict[str, Tensor]]  # weights by layer, as transformers has made them of the stored ones


def has_room(checkpoint: Path, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether all weights take less than a quarter of the free memory in float32; reading them is slow."""
    size = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors")) * 4 // dtype.itemsize
    free = free_memory() if device.type == "cpu" else free_device_memory(device)
    return free is not None and size < free / 4


@contextmanager
def open_by_layers(
    checkpoint: Path, dtype: torch.dtype, device: torch.device, kept: Layers | None = None
) -> Iterator[PreTrainedModel]:
    """The model of a checkpoint; transformers reads a decoder layer's weights when it runs, and drops them afterwards.

    With `kept`, they stay there; a second model takes them from there instead of reading, each once.
    Raises CheckpointError: transformers cannot load it. Memory: all weights outside of the layers, and one layer.
    """
    with ShardReader(checkpoint) as reader, _no_progress_bars():
        with explained_loading(checkpoint), init_empty_weights(include_buffers=False):
            config = AutoConfig.from_pretrained(checkpoint, local_files_only=True)
            model: PreTrainedModel = model_class(config)._from_config(config, dtype=dtype)
        model.set_experts_implementation(experts_argument(config, "grouped_mm"))
        mapping = get_model_conversion_mapping(model)
        settings = LoadStateDictConfig(device_map={"": device}, dtype=dtype, weight_mapping=mapping)

        def load(names: Sequence[str]) -> None:
            with explained_loading(checkpoint):
                convert_and_load_state_dict_in_model(model, {name: reader.tensor(name) for name in names}, settings)

        def load_layer(index: int, names: Sequence[str], layer: nn.Module, *_call: object) -> None:
            if kept and index in kept:
                known, own = kept.pop(index), layer.state_dict()
                layer.load_state_dict({name: known[name].to(own[name].dtype) for name in own}, assign=True)
                return
            load(names)
            if kept is not None:
                kept[index] = dict(layer.state_dict())

        def free(layer: nn.Module, *_call: object) -> None:
            layer.to("meta")

        outside = {*reader.names}
        for index, layer in enumerate(decoder_layers(model)[1]):
            inside = sorted(name for name in outside if f".layers.{index}." in name)
            outside.difference_update(inside)
            layer.register_forward_pre_hook(partial(load_layer, index, inside))
            layer.register_forward_hook(free)
        load(sorted(outside))
        model.tie_weights()
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        yield model.requires_grad_(False).eval()


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Transformers would show one for every layer."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
