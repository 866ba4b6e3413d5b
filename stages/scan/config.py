"""Settings of the scan."""

from dataclasses import dataclass, field

VERSION = 4

# Default tokens per batch: a few sequences keep a CPU busy, and it newly allocates larger tensors each time.
SMALL_BATCH, LARGE_BATCH = 1024, 2048


@dataclass
class ScanConfig:
    """Settings of the scan; explained in conf/scan."""

    batch_tokens: int | None = field(default=None, metadata={"minimum": 1})
    gradients: bool = True
    active_share: float = field(default=0.1, metadata={"above": 0, "maximum": 1})
    reservoir_tokens: int = field(default=4096, metadata={"minimum": 1})
    gradient_checkpointing: bool = field(default=False, metadata={"needs": {"gradients": True}})
    parameters: bool = False
    parameter_patterns: list[str] | None = field(
        default=None, metadata={"needs": {"parameters": True}, "nonempty": True}
    )
    block_width: int = field(default=64, metadata={"needs": {"parameters": True}, "minimum": 1, "maximum": 2**31 - 1})

    def active_count(self, width: int) -> int:
        """Neurons per token that count as active, of `width`."""
        return max(1, round(self.active_share * width))

    def batch_size(self, device_type: str) -> int:
        """Tokens per batch, padding included."""
        return self.batch_tokens or (SMALL_BATCH if device_type == "cpu" else LARGE_BATCH)
