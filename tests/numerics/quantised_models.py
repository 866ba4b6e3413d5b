"""4- and 8-bit checkpoints, written by transformers and bitsandbytes alone, and fp32 twins of the models."""

import torch
from pico import write_pico
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.integrations.bitsandbytes import dequantize_bnb_weight

STORED = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}


def write_plain(folder, model_type, *, dtype=torch.bfloat16, **more):
    """Write weights of several blocks of 64 elements; K and V of qwen2 (20 · 40) end in a partial block."""
    return write_pico(folder, model_type, dtype=dtype, hidden=40, intermediate=72, **more)


def store_quantised(source, folder, stored, *, dtype=torch.bfloat16, max_shard_size="5GB"):
    """Write the checkpoint that a user gets by saving a quantised model."""
    model = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=BitsAndBytesConfig(**STORED[stored]), dtype=dtype, device_map={"": "cpu"}
    )
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    for path in (*source.glob("*token*"), *source.glob("*.jinja")):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def decoded_weights(model):
    """Names and weights of all Linear layers, decoded by transformers."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            weight = module.weight
            quantised = hasattr(weight, "quant_state") or weight.dtype == torch.int8
            plain = dequantize_bnb_weight(weight, getattr(module, "state", None)) if quantised else weight
            yield name, plain.detach()


def plain_twin(model, plain_folder):
    """An fp32 model with the decoded weights of `model`'s Linear layers; its other weights are from `plain_folder`."""
    twin = AutoModelForCausalLM.from_pretrained(plain_folder, dtype=torch.float32).eval()
    for name, weight in decoded_weights(model):
        twin.get_submodule(name).weight.data = weight.float().clone()
    twin.tie_weights()
    return twin
