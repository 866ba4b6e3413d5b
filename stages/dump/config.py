"""Settings of the dump."""

from dataclasses import dataclass, field

from instruments.tensor_dump.config import DumpConfig

VERSION = 1


@dataclass
class DumpStageConfig(DumpConfig):
    """Selection of tensors, and amount of text; explained in conf/dump."""

    steps: int = field(default=1, metadata={"minimum": 1})
    batch_tokens: int = field(default=1024, metadata={"minimum": 1})
    gradients: bool = True
    gradient_checkpointing: bool = field(default=False, metadata={"needs": {"gradients": True}})
    enabled: bool = field(default=True, metadata={"fingerprint": False})
    folder: str | None = field(default=None, metadata={"fingerprint": False})
