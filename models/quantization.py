"""Models whose Linear layers hold 4- or 8-bit weights, through transformers and bitsandbytes."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import align_module_device
from jaxtyping import Float
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

from instruments.errors import ConfigError
from models.config import ModelConfig, import_bitsandbytes


def bitsandbytes_config(quantization: str, compute_dtype: torch.dtype) -> BitsAndBytesConfig:
    """Settings to quantise to nf4, fp4 or int8 while loading; embeddings, norms and the head stay unquantised.

    No double quantisation: it saves only 0.4 bits per weight, and rounds the scales, too.
    """
    if quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization,
        bnb_4bit_compute_dtype=compute_dtype,
        bnb_4bit_use_double_quant=False,
    )


def require_bitsandbytes(quantization: str) -> None:
    """Raise ConfigError if bitsandbytes is missing, too old, or without code for the devices here."""
    try:
        import_bitsandbytes()
        # Not at the top: it imports bitsandbytes.
        from transformers.integrations import validate_bnb_backend_availability  # noqa: PLC0415

        validate_bnb_backend_availability(raise_exception=True)
    except (ImportError, OSError, RuntimeError) as error:
        what = f"bitsandbytes cannot be used here: {str(error).splitlines()[0]}"
        do = "pip install -U -e '.[quantization]', or model.quantization=none and an unquantised checkpoint"
        raise ConfigError(what, where=f"weights in {quantization}", do=do) from error


@contextmanager
def explained_offload(model: ModelConfig) -> Iterator[None]:
    """Turn transformers' refusal to offload into a ConfigError that names the settings."""
    try:
        yield
    except ValueError as error:
        if "dispatched on the CPU or the disk" not in str(error):
            raise
        what = "quantised layers cannot be offloaded to memory or disk, and do not fit on the devices"
        do = "model.quantization=none, model.quantization=nf4, or larger model.gpu_memory and model.cpu_memory"
        raise ConfigError(what, where=f"model.device_map={model.device_map}", do=do) from error


def prepare_quantised(model: nn.Module, dtype: torch.dtype) -> None:
    """Make a quantised model compute in `dtype`, with gradients on every CPU.

    In a checkpoint stored in 4 or 8 bits, transformers leaves the unquantised weights in their format on disk, even if
    `dtype` is requested. On a CPU with AVX512-BF16, bitsandbytes repacks a weight at its first use without gradients;
    later products with it silently give no gradient.
    """
    # Every product of every int8 layer warns that inputs are cast to float16.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point() and getattr(parameter, "quant_state", None) is None:
                parameter.data = parameter.data.to(dtype)
        if isinstance(module, import_bitsandbytes().nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
            # A stored checkpoint names its own compute dtype, mostly float32. The forward pass decodes weights to the
            # compute dtype, but the backward pass to the format before quantisation.
            module.compute_dtype, module.compute_type_is_set = dtype, True
            module.weight.quant_state.dtype = dtype


def dense_weight(module: nn.Module) -> Float[Tensor, "O I"]:
    """The weight of a Linear layer, dequantised if needed, on its device; it may be offloaded.

    An unquantised weight is not copied. 4 bits are decoded to the compute dtype, 8 bits to fp32.

    Numerics: the weight of bitsandbytes' backward pass; 4 bits exactly, int8 to 1 fp32 rounding.
    """
    layer: Any = module  # bitsandbytes' attributes are not typed
    with align_module_device(module):
        weight: Tensor = layer.weight.detach()
        if getattr(layer.weight, "quant_state", None) is not None:
            weight = import_bitsandbytes().functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        elif weight.dtype == torch.int8:
            # The first forward pass moves the scales from the weight to the layer's state.
            scales = layer.state.SCB if layer.weight.SCB is None else layer.weight.SCB
            weight = import_bitsandbytes().functional.int8_vectorwise_dequant(layer.weight.data, scales)
    return weight
