"""Weights in 4 or 8 bits: what config.json says of them, and the optional package that decodes them."""

import logging
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from instruments.errors import ConfigError

# Storage formats that are read; None: unquantised.
DECODED = {None, "nf4", "fp4", "int8", "fp8"}
# Formats of compressed-tensors that are FP8 weights with scales.
_COMPRESSED_FP8 = {"float-quantized", "mxfp8-quantized"}


def stored_quantization(config: Mapping[str, Any]) -> str | None:
    """The storage format in config.json: nf4, fp4, int8, fp8, another method's name; None: unquantised weights."""
    text = config.get("text_config")
    places = (config, text if isinstance(text, Mapping) else {})
    stored = next((found for part in places if (found := part.get("quantization_config"))), None)
    if not isinstance(stored, Mapping):
        return "unknown" if stored else None
    if stored.get("load_in_8bit"):
        return "int8"
    if stored.get("load_in_4bit"):
        return str(stored.get("bnb_4bit_quant_type", "fp4"))
    method = str(stored.get("quant_method", "unknown"))
    # Rotated weights would need their rotations.
    plain = stored.get("format") in _COMPRESSED_FP8 and not stored.get("transform_config")
    fp8 = {"compressed-tensors": plain, "modelopt": stored.get("quant_algo") == "FP8", "fbgemm_fp8": True}
    return "fp8" if fp8.get(method) else method


def missing_bitsandbytes(what: str) -> ConfigError:
    """The error for a missing bitsandbytes, which is not made for every platform."""
    do = "pip install bitsandbytes, or model.quantization=none and an unquantised checkpoint"
    return ConfigError(f"{what} needs the package bitsandbytes", where="model.quantization", do=do)


def import_bitsandbytes(what: str = "quantisation") -> ModuleType:
    """Import the optional, slow package. Raises ConfigError: it is missing, and `what` needs it."""
    if not find_spec("bitsandbytes"):
        raise missing_bitsandbytes(what)
    # On a CPU with AVX512-BF16 its import downloads and runs a kernel from the hub, or warns that it cannot. Both are
    # prevented here; `prepare_quantised` switches that kernel off.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    loaded: dict[str, Any] = sys.modules
    hidden = {name: loaded[name] for name in ("kernels",) if name in loaded}
    loaded["kernels"] = None  # makes its import fail
    try:
        return import_module("bitsandbytes")
    finally:
        del loaded["kernels"]
        loaded |= hidden
