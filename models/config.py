"""Which dense model is carved, and how it is loaded."""

from dataclasses import dataclass, field


@dataclass
class ModelConfig:
    """The dense source model."""

    # embedded: the small model in this repository; local: a folder; hub: a repository of the Hugging Face hub.
    kind: str = field(default="embedded", metadata={"choices": ("embedded", "local", "hub")})
    # Short name used in outputs/artifacts/<label>/.
    label: str = field(default="embedded", metadata={"fingerprint": False})
    # Folder of a safetensors checkpoint (kind=local).
    path: str | None = None
    # Repository id (kind=hub), e.g. Qwen/Qwen2.5-0.5B.
    name: str | None = None
    # Branch, tag or commit of the hub repository.
    revision: str | None = None
    # Arithmetic of scan and evaluation: float32, bfloat16, float16, or auto (float32 on CPU, the checkpoint's own on a
    # GPU).
    dtype: str = field(default="auto", metadata={"choices": ("auto", "float32", "bfloat16", "float16")})
    # cpu, cuda, cuda:1 ..., or auto (a GPU where there is one).
    device: str = "auto"
    # Run Python code that comes with the checkpoint. Never needed for the supported families.
    trust_remote_code: bool = False
    # Default shape of a carve of this model; the root dials experts= and n= override it.
    experts: int = field(default=100, metadata={"fingerprint": False})
    n: int = field(default=256, metadata={"fingerprint": False})
