"""Settings of the scan."""

from dataclasses import dataclass, field

VERSION = 3

# Default tokens per batch. Reading on a CPU takes the small one: a few sequences keep it busy, and larger tensors are
# newly allocated each time. Generation is faster with more sequences at once on any device.
SMALL_BATCH, LARGE_BATCH = 1024, 2048


@dataclass
class ScanConfig:
    """Settings of the scan; explained in conf/scan."""

    batch_tokens: int | None = field(default=None, metadata={"minimum": 1})
    gradients: bool = True
    active_share: float = field(default=0.1, metadata={"above": 0, "maximum": 1})
    active_threshold: float | None = field(default=None, metadata={"minimum": 0})
    reservoir_tokens: int = field(default=4096, metadata={"minimum": 1})
    gradient_checkpointing: bool = False
    norm_product: str = field(default="auto", metadata={"choices": ("auto", "gram", "direct")})
    parameters: bool = False
    parameter_patterns: list[str] | None = field(default=None, metadata={"nonempty": True})
    block_width: int = field(default=64, metadata={"minimum": 1, "maximum": 2**31 - 1})
    per_token: bool = False
    parameter_encoding: str = field(default="log16", metadata={"choices": ("log16", "f32")})

    def unread(self) -> dict[str, str]:
        """Settings without effect, each with the setting that disables it."""
        found: dict[str, str] = {}
        if not self.gradients:
            found |= dict.fromkeys(("gradient_checkpointing", "norm_product"), "scan.gradients=false")
        if self.active_threshold is not None:
            found["active_share"] = f"scan.active_threshold={self.active_threshold:g}"
        if not self.parameters:
            record = ("parameter_patterns", "block_width", "per_token", "parameter_encoding")
            found |= dict.fromkeys(record, "scan.parameters=false")
        return found

    def active_count(self, width: int) -> int:
        """Neurons per token that count as active, of `width`."""
        return max(1, round(self.active_share * width))

    def read_batch(self, device_type: str) -> int:
        """Tokens per batch of the forward and backward pass, padding included."""
        return self.batch_tokens or (SMALL_BATCH if device_type == "cpu" else LARGE_BATCH)

    def written_batch(self) -> int:
        """Tokens per batch of generation, prompts and padding included."""
        return self.batch_tokens or LARGE_BATCH
