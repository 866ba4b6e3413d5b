"""Settings of the dense model, the shape of a carve, and checks before weights are loaded."""

import logging
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from platform import machine
from types import ModuleType
from typing import Any

from instruments.errors import CheckpointError, ConfigError, UserError


@dataclass
class ModelConfig:
    """The dense source model; explained in conf/model."""

    kind: str = field(default="embedded", metadata={"choices": ("embedded", "local", "hub")})
    label: str = field(default="embedded", metadata={"fingerprint": False})
    path: str | None = None
    name: str | None = None
    revision: str | None = None
    dtype: str = field(default="auto", metadata={"choices": ("auto", "float32", "bfloat16", "float16")})
    device: str = "auto"
    quantization: str = field(default="none", metadata={"choices": ("none", "nf4", "fp4", "int8")})
    device_map: str = field(
        default="none", metadata={"choices": ("none", "auto", "balanced", "sequential"), "fingerprint": False}
    )
    gpu_memory: str | None = field(default=None, metadata={"fingerprint": False})
    cpu_memory: str | None = field(default=None, metadata={"fingerprint": False})
    hidden_memory: str | None = field(default=None, metadata={"fingerprint": False})
    trust_remote_code: bool = False
    experts: int | None = field(default=None, metadata={"fingerprint": False})
    n: int | None = field(default=None, metadata={"fingerprint": False})

    @property
    def source_name(self) -> str:
        """The repository on the hub, the name of the local folder, or the label of the embedded model."""
        local = Path(self.path or "").resolve().name if self.kind == "local" else self.label
        return str(self.name) if self.kind == "hub" else local


# Device files of CUDA (desktop, Jetson, WSL) and ROCm.
DRIVERS = ("nvidia*", "nvhost*", "nvmap", "dxg", "kfd")


def is_on_host(model: ModelConfig) -> bool:
    """Whether the model computes on the CPU. Imports torch only for `auto` on a system with drivers of a GPU."""
    if model.device != "auto":
        return model.device == "cpu"
    if "torch" not in sys.modules and sys.platform != "win32" and not any(map(list, map(Path("/dev").glob, DRIVERS))):
        return True
    import torch  # noqa: PLC0415 - slow to import

    return not torch.cuda.is_available()


def setting_word(key: str, value: str) -> str:
    """`key=value` for the command line, with the quotes that the shell and Hydra need."""
    if re.fullmatch(r"[\w./:+-]+( [\w./:+-]+)*", value, re.ASCII):
        return shlex.quote(f"{key}={value}")
    escaped = value.replace("\\'", "'").replace("'", "\\'")
    return shlex.quote(f"{key}='{escaped}'")


def check_kind(model: ModelConfig) -> Iterator[ConfigError]:
    """Yield an error if settings of one kind of source are given for another, which would ignore them."""
    where = f"model.kind={model.kind}"
    hub = {f"model.{name}": value for name in ("name", "revision") if (value := getattr(model, name))}
    if model.kind != "hub" and hub:
        what = f"only model=hub reads {' and '.join(f'{key}={value}' for key, value in hub.items())}"
        do = " ".join(["model=hub", *(setting_word(*pair) for pair in hub.items())])
        yield ConfigError(what, where=where, do=do if model.name else "model.revision=null")
    if model.kind != "local" and model.path:
        what, do = f"only model=local reads model.path={model.path}", setting_word("model.path", model.path)
        yield ConfigError(what, where=where, do=f"model=local {do}")


PER_LAYER, GLOBAL_POOL = "per_layer", "global_pool"
TOPOLOGIES = (PER_LAYER, GLOBAL_POOL)


@dataclass(frozen=True)
class MoEShape:
    """Per layer: S always-on neurons and E experts of N neurons; K experts are active per token.

    In a global pool all layers share the same E experts, and every layer sends a token to K of them.
    """

    experts: int
    n: int
    top_k: int
    always_on: int
    topology: str = PER_LAYER
    dense_layers: tuple[int, ...] = ()  # ascending; their FFNs stay dense

    @property
    def active_width(self) -> int:
        """Active neurons per token and layer: S + K·N."""
        return self.always_on + self.top_k * self.n

    @property
    def pooled(self) -> bool:
        """Whether all layers share the experts."""
        return self.topology == GLOBAL_POOL

    def active_share(self, width: int, layers: int) -> float:
        """Active share of a layer's `width` neurons, averaged over all layers, dense ones included."""
        kept = len(self.dense_layers) / max(1, layers)
        return (1 - kept) * self.active_width / width + kept

    def neurons(self, layers: int) -> int:
        """Neurons of all experts and always-on neurons of all layers, as if no layer were dense."""
        return self.experts * self.n * (1 if self.pooled else layers) + self.always_on * layers


# Platforms that bitsandbytes is published for, as sys.platform and platform.machine() name them.
_PLATFORMS = {"linux x86_64", "linux aarch64", "win32 AMD64", "win32 ARM64", "darwin arm64"}
_MEMORY = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT])(i?)B", re.IGNORECASE)


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


def check_quantization(model: ModelConfig, config: Mapping[str, Any]) -> Iterator[UserError]:
    """Yield an error for quantisation that the installation or the checkpoint does not support."""
    stored, asked = stored_quantization(config), model.quantization
    if stored not in {None, "nf4", "fp4", "int8"}:
        what, where = f"weights quantised by {stored} cannot be sliced", "quantization_config in config.json"
        yield CheckpointError(what, where=where, do="give the unquantised checkpoint, or one stored by bitsandbytes")
        return
    if stored and asked not in {"none", stored}:
        what = f"model.quantization={asked}, but the checkpoint is stored in {stored}"
        do = "model.quantization=none, which takes it as it is, or give the unquantised checkpoint"
        yield ConfigError(what, where="model.quantization", do=do)
    if (stored or asked != "none") and not find_spec("bitsandbytes"):
        yield _missing_bitsandbytes(f"a checkpoint stored in {stored}" if stored else f"model.quantization={asked}")


def _missing_bitsandbytes(what: str) -> ConfigError:
    """The error for a missing bitsandbytes, with the remedy for this platform."""
    platform = f"{sys.platform} {machine()}"
    known = platform in _PLATFORMS
    what = f"{what} needs the package bitsandbytes" + ("" if known else f", which is not made for {platform}")
    do = "pip install -e '.[quantization]'" if known else "model.quantization=none and an unquantised checkpoint"
    return ConfigError(what, where="model.quantization", do=do)


def import_bitsandbytes(what: str = "quantisation") -> ModuleType:
    """Import the optional, slow package. Raises ConfigError: it is missing, and `what` needs it."""
    if not find_spec("bitsandbytes"):
        raise _missing_bitsandbytes(what)
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


def check_placement(model: ModelConfig) -> Iterator[ConfigError]:
    """Yield an error for memory limits that have no effect or are not written as an amount of memory."""
    for name in ("gpu_memory", "cpu_memory", "hidden_memory"):
        amount = getattr(model, name)
        if amount is None:
            continue
        if model.device_map == "none" and name != "hidden_memory":
            what = f"model.{name}={amount} has no effect on a model that is all on one device"
            yield ConfigError(what, where=f"model.{name}", do=f"model.device_map=auto model.{name}={amount}")
        if not _MEMORY.fullmatch(amount):
            yield ConfigError(
                f"model.{name}={amount} is no amount of memory", where=f"model.{name}", do=f"model.{name}=20GiB"
            )


def memory_bytes(amount: str) -> int:
    """Convert an amount such as 20GiB, 512 MB or 0KB, which `check_placement` has accepted, to bytes."""
    found = _MEMORY.fullmatch(amount)
    assert found, "checked before"
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** (" KMGT".index(unit.upper())))
