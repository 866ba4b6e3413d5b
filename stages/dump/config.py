"""Settings of the dump."""

from dataclasses import dataclass, field

from instruments.tensor_dump.config import DumpConfig

VERSION = 1


@dataclass
class DumpStageConfig(DumpConfig):
    """What is dumped of the dense model, and on how much text."""

    # Batches of calibration text that the model reads; each is a step.
    steps: int = field(default=1, metadata={"minimum": 1})
    # Tokens per batch, padding included.
    batch_tokens: int = field(default=1024, metadata={"minimum": 1})
    # Also run the backward pass, without which there is no gradient.
    gradients: bool = True
    # Recompute activations in the backward pass: less memory, the same tensors.
    gradient_checkpointing: bool = False
    # False: refuse to run. As the next, it does not change what a dump holds.
    enabled: bool = field(default=True, metadata={"fingerprint": False})
    # A link of this name to the published dump.
    folder: str | None = field(default=None, metadata={"fingerprint": False})
