"""The carved checkpoint as transformers runs it, beside the dense model it came from."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import models.tiny_onn.register  # noqa: F401 - transformers then knows the project's own class
from models.config import ModelConfig
from models.loading import resolve_device
from models.placement import input_device, placement
from models.shape import Shape
from stages.data.batches import TokenBatch


def load_carved(folder: Path, model: ModelConfig, dtype: torch.dtype, offload_folder: Path) -> PreTrainedModel:
    """The checkpoint, frozen, placed as the dense model is.

    Args:
        folder: of the checkpoint.
        model: whose device or devices it is to lie on.
        dtype: number format of its weights.
        offload_folder: for weights that fit nowhere else; transformers joins experts while loading, so that what it
            would read later stands in no file of the checkpoint.
    """
    carved: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        local_files_only=True,
        experts_implementation="grouped_mm",
        offload_folder=offload_folder,
        **placement(model, resolve_device(model)),
    )
    return carved.eval().requires_grad_(False)


@torch.no_grad()
def measure_speed(models: dict[str, PreTrainedModel], batches: Sequence[TokenBatch], tokens: int) -> dict[str, float]:
    """Prefill tokens per second of each model; the models take turns on every batch, so drift hits all alike."""
    timed, seen = [], 0
    for batch in batches:
        timed.append(batch)
        seen += batch.input_ids.numel()
        if seen >= tokens:
            break
    for model in models.values():
        time_forward(model, timed[0])
    seconds = dict.fromkeys(models, 0.0)
    for batch in timed:
        for name, model in models.items():
            seconds[name] += time_forward(model, batch)
    return {name: seen / spent for name, spent in seconds.items()}


def time_forward(model: PreTrainedModel, batch: TokenBatch) -> float:
    """Seconds of one forward pass without the output embedding of all but the last token."""
    device = input_device(model)
    begin = time.perf_counter()
    model(input_ids=batch.input_ids.to(device), use_cache=False, logits_to_keep=1)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def count_parameters(model: PreTrainedModel, shape: Shape) -> tuple[int, int]:
    """All parameters, and those a token passes: without the experts it is not sent to.

    Experts that all layers share are passed, and counted, once in every layer.
    """
    sizes = {name: count_numbers(parameter) for name, parameter in model.named_parameters()}
    total, experts = sum(sizes.values()), sum(size for name, size in sizes.items() if ".experts." in f".{name}")
    times = model.config.num_hidden_layers if shape.pooled else 1
    return total, total - experts + experts * shape.top_k * times // shape.experts


def count_numbers(parameter: nn.Parameter) -> int:
    """Elements of the matrix that a parameter stands for; one of 4 bits is stored two to a byte."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()
