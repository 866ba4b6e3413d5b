"""Settings of the accumulator."""

from dataclasses import dataclass, field


@dataclass
class StoreConfig:
    """Where a running scan keeps its sums."""

    # local: a file beside the artefact being written.
    kind: str = field(default="local", metadata={"choices": ("local",), "fingerprint": False})
    # Seconds between checkpoints of a running scan; a killed scan goes on from the last one.
    checkpoint_every: float = field(default=30.0, metadata={"minimum": 0, "fingerprint": False})
