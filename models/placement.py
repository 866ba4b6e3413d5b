"""Where the parts of a model lie: on one device, or spread over GPUs, memory and disk."""

from typing import Any

import torch
from accelerate.utils import get_max_memory
from torch import nn
from transformers import PreTrainedModel

from models.config import ModelConfig


def placement(model: ModelConfig, device: torch.device) -> dict[str, Any]:
    """What `from_pretrained` is to be told: everything on `device`, or what may go where.

    On a CPU no GPU is used. What fits nowhere stays on disk and is read from the checkpoint when it is needed.
    """
    if model.device_map == "none":
        return {"device_map": {"": device}}
    limits: dict[int | str, int | str] = {"cpu": model.cpu_memory or get_max_memory()["cpu"]}
    if device.type != "cpu":
        free = get_max_memory()
        limits |= {place: model.gpu_memory or free[place] for place in free if place != "cpu"}
    return {"device_map": model.device_map, "max_memory": limits}


def is_offloaded(model: nn.Module) -> bool:
    """Whether weights come from memory or disk each time they are used.

    The graph would keep every such weight until the backward pass has used it: recompute activations instead
    (gradient checkpointing), and one layer's are alive at a time.
    """
    return any(parameter.device.type == "meta" for parameter in model.parameters())


def input_device(model: PreTrainedModel) -> torch.device:
    """Where token ids, masks and labels are to go: the device that looks embeddings up; logits come back there."""
    return execution_device(model.get_input_embeddings())


def execution_device(module: nn.Module) -> torch.device:
    """Where a module with a weight computes, also if that weight comes from elsewhere each time."""
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    return module.weight.device if device is None else torch.device(device)  # type: ignore[return-value]
