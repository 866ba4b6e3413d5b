"""Weights in 4 or 8 bits: what config.json says of them, and the optional package that decodes them."""

import logging
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from platform import machine
from types import ModuleType
from typing import Any

from instruments.errors import ConfigError

# Platforms that bitsandbytes is published for, as sys.platform and platform.machine() name them.
_PLATFORMS = {"linux x86_64", "linux aarch64", "win32 AMD64", "win32 ARM64", "darwin arm64"}


def stored_quantization(config: Mapping[str, Any]) -> str | None:
    """The storage format in config.json: nf4, fp4, int8, another method's name, or None for unquantised weights."""
    stored = config.get("quantization_config")
    if not stored:
        return None
    if stored.get("load_in_8bit"):
        return "int8"
    if stored.get("load_in_4bit"):
        return str(stored.get("bnb_4bit_quant_type", "fp4"))
    return str(stored.get("quant_method", "unknown"))


def missing_bitsandbytes(what: str) -> ConfigError:
    """The error for a missing bitsandbytes, with the remedy for this platform."""
    platform = f"{sys.platform} {machine()}"
    known = platform in _PLATFORMS
    what = f"{what} needs the package bitsandbytes" + ("" if known else f", which is not made for {platform}")
    do = "pip install -e '.[quantization]'" if known else "model.quantization=none and an unquantised checkpoint"
    return ConfigError(what, where="model.quantization", do=do)


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
