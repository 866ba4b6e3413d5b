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
    """How transformers quantises while loading, to nf4, fp4 or int8; embeddings, norms and the head stay as they are.

    Scales are not quantised a second time: 0.4 bits a weight are not worth a second rounding.
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
    """Refuse a package that is missing or too old, and devices that it has no code for. Raises ConfigError."""
    try:
        import_bitsandbytes()
        # Imports the package itself.
        from transformers.integrations import validate_bnb_backend_availability  # noqa: PLC0415

        validate_bnb_backend_availability(raise_exception=True)
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"bitsandbytes cannot be used here: {str(error).splitlines()[0]}",
            where=f"weights in {quantization}",
            do="pip install -U -e '.[quantization]', or model.quantization=none and an unquantised checkpoint",
        ) from error


@contextmanager
def explained_offload(model: ModelConfig) -> Iterator[None]:
    """Turn transformers' refusal to offload into an error that names the settings. Raises ConfigError."""
    try:
        yield
    except ValueError as error:
        if "dispatched on the CPU or the disk" not in str(error):
            raise
        raise ConfigError(
            "quantised layers cannot be offloaded to memory or disk, and do not fit on the devices",
            where=f"model.device_map={model.device_map}",
            do="model.quantization=none, model.quantization=nf4, or larger model.gpu_memory and model.cpu_memory",
        ) from error


def prepare_quantised(model: nn.Module, dtype: torch.dtype) -> None:
    """Make a quantised model compute in `dtype`, and give gradients on every CPU.

    transformers leaves the other weights of a checkpoint in 4 or 8 bits in their format on disk, even if another is
    asked for. And on a CPU with AVX512-BF16 bitsandbytes repacks a weight at its first use without gradients; from
    then on its products silently give no gradient.
    """
    # It warns at every product of every int8 layer that inputs are cast to float16.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point() and getattr(parameter, "quant_state", None) is None:
                parameter.data = parameter.data.to(dtype)
        if isinstance(module, import_bitsandbytes().nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
            # A stored checkpoint names its own for products, mostly float32. And the backward pass decodes weights in
            # the format they were quantised from, though the forward pass does in that of its products.
            module.compute_dtype, module.compute_type_is_set = dtype, True
            module.weight.quant_state.dtype = dtype


def dense_weight(module: nn.Module) -> Float[Tensor, "O I"]:
    """The weight of a Linear layer as plain numbers, on its device.

    The weight itself where it is plain, else a copy: of 4 bits in the format that products are computed in, of 8 bits
    in fp32. It may be offloaded.

    Numerics: what bitsandbytes multiplies by in the backward pass; 4 bits exactly, int8 to 1 fp32 rounding.
    """
    layer: Any = module  # bitsandbytes' attributes are not typed
    with align_module_device(module):
        weight: Tensor = layer.weight.detach()
        if getattr(layer.weight, "quant_state", None) is not None:
            weight = import_bitsandbytes().functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        elif weight.dtype == torch.int8:
            # The first forward pass moves the scales from the weight to the layer.
            scales = layer.state.SCB if layer.weight.SCB is None else layer.weight.SCB
            weight = import_bitsandbytes().functional.int8_vectorwise_dequant(layer.weight.data, scales)
    return weight
