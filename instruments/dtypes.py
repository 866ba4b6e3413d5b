"""Number formats: their names in torch, in safetensors files and in settings, and their sizes. Imports no torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Name in safetensors files → name in torch, bytes per number.
SAFETENSORS = {
    "BOOL": ("bool", 1), "U8": ("uint8", 1), "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "F8_E8M0": ("float8_e8m0fnu", 1),
    "U16": ("uint16", 2), "I16": ("int16", 2), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4), "I32": ("int32", 4), "F32": ("float32", 4),
    "U64": ("uint64", 8), "I64": ("int64", 8), "F64": ("float64", 8),
}  # fmt: skip
_STORED_NAMES = {name: stored for stored, (name, _size) in SAFETENSORS.items()}

SIZES = dict(SAFETENSORS.values())  # name in torch → bytes per number

# Formats that models compute in, and those of weights.
COMPUTED = ("float32", "bfloat16", "float16")
FLOATING = (*COMPUTED, "float64")

_SHORT = {
    "double": "float64", "float": "float32", "fp32": "float32", "half": "float16", "fp16": "float16",
    "bf16": "bfloat16", "fp8": "float8_e4m3fn", "e4m3": "float8_e4m3fn", "e4m3fn": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "fp8_e5m2": "float8_e5m2",
}  # fmt: skip


def dtype_name(dtype: object) -> str:
    """Torch's name without "torch." of a dtype, of its text, or of a short name such as bf16."""
    name = str(dtype).removeprefix("torch.")
    return _SHORT.get(name.lower(), name)


def stored_name(dtype: object) -> str:
    """The name in safetensors files, of what `dtype_name` takes. Raises KeyError."""
    return _STORED_NAMES[dtype_name(dtype)]


def torch_dtype(stored: str) -> "torch.dtype":
    """The dtype of a name in safetensors files. Raises KeyError."""
    import torch  # noqa: PLC0415 - headers are checked without torch, which is slow to import

    dtype: torch.dtype = getattr(torch, SAFETENSORS[stored][0])
    return dtype
