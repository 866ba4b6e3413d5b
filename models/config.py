"""Settings of the dense model, and the shape of a carve."""

import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

MEMORY = r"(?i:(\d+(?:\.\d+)?) ?([KMGT])(i?)B)"
# Patterns of texts → what they are.
_LABEL = {"pattern": (r"[\w+-][\w.+ -]{0,99}", "a plain folder name")}
_DEVICE = {"pattern": (r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda, cuda:0, cuda:1 ...")}
_AMOUNT = {"pattern": (MEMORY, "an amount of memory, such as 20GiB"), "fingerprint": False}
_SPREADING = ("auto", "balanced", "sequential")
_SPREAD = {"device_map": _SPREADING}


@dataclass
class ModelConfig:
    """The dense source model; explained in conf/model."""

    kind: str = field(default="embedded", metadata={"choices": ("embedded", "local", "hub")})
    label: str = field(default="embedded", metadata={"fingerprint": False, **_LABEL})
    path: str | None = field(default=None, metadata={"needs": {"kind": "local"}, "fingerprint": False})
    name: str | None = field(default=None, metadata={"needs": {"kind": "hub"}})
    revision: str | None = field(default=None, metadata={"needs": {"kind": "hub"}})
    dtype: str = field(default="auto", metadata={"choices": ("auto", "float32", "bfloat16", "float16")})
    device: str = field(default="auto", metadata=_DEVICE)
    quantization: str = field(default="none", metadata={"choices": ("none", "nf4", "fp4", "int8")})
    device_map: str = field(default="none", metadata={"choices": ("none", *_SPREADING), "fingerprint": False})
    gpu_memory: str | None = field(default=None, metadata={**_AMOUNT, "needs": _SPREAD})
    cpu_memory: str | None = field(default=None, metadata={**_AMOUNT, "needs": _SPREAD})
    hidden_memory: str | None = field(default=None, metadata=_AMOUNT)
    rounded_products: bool = True
    trust_remote_code: bool = False
    experts: int | None = field(default=None, metadata={"fingerprint": False})
    n: int | None = field(default=None, metadata={"fingerprint": False})
    dense_layers: list[int] = field(default_factory=list, metadata={"fingerprint": False})

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

    def active_share(self, width: int, layers: int, lacking: float = 0.0) -> float:
        """Active share of all layers' neurons, dense ones included; `width` in each but for `Decoder.lacking`."""
        kept = (len(self.dense_layers) - lacking) / max(1, layers - lacking)
        return (1 - kept) * self.active_width / width + kept

    def neurons(self, layers: int) -> int:
        """Neurons of all experts and always-on neurons of all layers, as if no layer were dense."""
        return self.experts * self.n * (1 if self.pooled else layers) + self.always_on * layers


def memory_bytes(amount: str) -> int:
    """Convert an amount such as 20GiB, 512 MB or 0KB, in the pattern MEMORY, to bytes."""
    found = re.fullmatch(MEMORY, amount)
    assert found, "checked before"
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** (" KMGT".index(unit.upper())))
