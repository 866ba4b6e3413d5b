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
    gradient_checkpointing: bool = False
    enabled: bool = field(default=True, metadata={"fingerprint": False})
    folder: str | None = field(default=None, metadata={"fingerprint": False})

    def unread(self, *, offloaded: bool) -> dict[str, str]:
        """Settings without effect → the reason; `offloaded`: the model is always recomputed, see `save_memory`."""
        if not self.gradients:
            return dict.fromkeys(("gradient_checkpointing", "recomputed"), "dump.gradients=false")
        return {} if self.gradient_checkpointing or offloaded else {"recomputed": "dump.gradient_checkpointing=false"}
