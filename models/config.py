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
    # Arithmetic of the Linear layers' weights: none (as the checkpoint stores them), nf4, fp4 or int8 (by bitsandbytes
    # while loading). Experts are cut from the stored weights whatever is said here.
    quantization: str = field(default="none", metadata={"choices": ("none", "nf4", "fp4", "int8")})
    # For a model larger than one device. none: all on `device`; auto, balanced, sequential: spread over GPUs, then
    # memory, then disk, as accelerate does.
    device_map: str = field(
        default="none", metadata={"choices": ("none", "auto", "balanced", "sequential"), "fingerprint": False}
    )
    # With device_map: what the model may take of each GPU, such as 20GiB; null: what is free.
    gpu_memory: str | None = field(default=None, metadata={"fingerprint": False})
    # With device_map: what it may take of the machine's memory; what is left over is read from disk when needed.
    cpu_memory: str | None = field(default=None, metadata={"fingerprint": False})
    # Run Python code that comes with the checkpoint. Never needed for the supported families.
    trust_remote_code: bool = False
    # Default shape of a carve of this model; the root dials experts= and n= override it. None: what suits its width.
    experts: int | None = field(default=None, metadata={"fingerprint": False})
    n: int | None = field(default=None, metadata={"fingerprint": False})
