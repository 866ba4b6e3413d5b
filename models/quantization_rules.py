"""Number formats and places a model may be loaded in, checked before any weights are."""

import re
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from platform import machine
from typing import Any

from instruments.errors import CheckpointError, ConfigError, UserError
from models.config import ModelConfig

# Where bitsandbytes is published for, as sys.platform and platform.machine() say it.
_PLATFORMS = {
    ("linux", "x86_64"),
    ("linux", "aarch64"),
    ("win32", "AMD64"),
    ("win32", "ARM64"),
    ("darwin", "arm64"),
}
_MEMORY = re.compile(r"\d+(\.\d+)? ?[KMGT]i?B", re.IGNORECASE)


def stored_quantization(config: Mapping[str, Any]) -> str | None:
    """How config.json says the weights are stored: nf4, fp4, int8, another method's name, or None for plain numbers."""
    stored = config.get("quantization_config")
    if not stored:
        return None
    if stored.get("load_in_8bit"):
        return "int8"
    if stored.get("load_in_4bit"):
        return str(stored.get("bnb_4bit_quant_type", "fp4"))
    return str(stored.get("quant_method", "unknown"))


def check_quantization(model: ModelConfig, config: Mapping[str, Any]) -> Iterator[UserError]:
    """Quantisation that this installation or this checkpoint does not allow."""
    stored, asked = stored_quantization(config), model.quantization
    if stored not in {None, "nf4", "fp4", "int8"}:
        yield CheckpointError(
            f"weights quantised by {stored} cannot be sliced",
            where="quantization_config in config.json",
            do="give the unquantised checkpoint, or one stored by bitsandbytes",
        )
        return
    if stored and asked not in {"none", stored}:
        yield ConfigError(
            f"model.quantization={asked}, but the checkpoint is stored in {stored}",
            where="model.quantization",
            do="model.quantization=none, which takes it as it is, or give the unquantised checkpoint",
        )
    if (stored or asked != "none") and not find_spec("bitsandbytes"):
        yield missing_bitsandbytes(f"a checkpoint stored in {stored}" if stored else f"model.quantization={asked}")


def missing_bitsandbytes(what: str = "quantisation") -> ConfigError:
    """The error of an installation without the optional extra, or of a platform that has none."""
    platform = (sys.platform, machine())
    known = platform in _PLATFORMS
    return ConfigError(
        f"{what} needs the package bitsandbytes" + ("" if known else f", which is not made for {' '.join(platform)}"),
        where="model.quantization",
        do="pip install -e '.[quantization]'" if known else "model.quantization=none and an unquantised checkpoint",
    )


def check_placement(model: ModelConfig) -> Iterator[ConfigError]:
    """Memory limits that nobody would keep, or that are no amount of memory."""
    for name in ("gpu_memory", "cpu_memory"):
        amount = getattr(model, name)
        if amount is None:
            continue
        if model.device_map == "none":
            yield ConfigError(
                f"model.{name}={amount} has no effect on a model that is all on one device",
                where=f"model.{name}",
                do=f"model.device_map=auto model.{name}={amount}",
            )
        if not _MEMORY.fullmatch(amount):
            yield ConfigError(
                f"model.{name}={amount} is no amount of memory", where=f"model.{name}", do=f"model.{name}=20GiB"
            )
