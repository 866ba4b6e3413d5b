"""Weights stored in 4 or 8 bits, decoded by bitsandbytes."""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from models.checkpoint.dtypes import TORCH_DTYPES
from models.checkpoint.packed import PackedEntry
from models.quantization_rules import missing_bitsandbytes


def dequantise(entry: PackedEntry, parts: Mapping[str, Tensor]) -> Tensor:
    """The weight in its true shape and number format.

    Args:
        entry: what the headers say of it.
        parts: its tensors as stored.
    Raises:
        ConfigError: bitsandbytes is not installed.
    Numerics: 4 bits exactly as bitsandbytes decodes them, in the format the weight had before; int8 in fp32, then
        rounded once.
    """
    # Imported here: it takes a while, and is an optional extra.
    if not find_spec("bitsandbytes"):
        raise missing_bitsandbytes(f"a checkpoint stored in {entry.kind}")
    functional = import_module("bitsandbytes.functional")
    plain: Tensor
    if entry.kind == "int8":
        plain = functional.int8_vectorwise_dequant(parts["weight"], parts["SCB"])
        return plain.to(TORCH_DTYPES[entry.dtype])
    state = functional.QuantState.from_dict(
        {key: part for key, part in parts.items() if key != "weight"}, torch.device("cpu")
    )
    # Packed bytes may be stored under another format's name, for the sake of distributed training.
    plain = functional.dequantize_4bit(parts["weight"].view(torch.uint8).view(-1, 1), state)
    return plain.to(TORCH_DTYPES[entry.dtype])
