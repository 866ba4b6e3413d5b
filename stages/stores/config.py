"""Settings of the accumulator."""

from dataclasses import dataclass


@dataclass
class StoreConfig:
    """Where a running scan keeps its sums."""

    # local: a file beside the artefact being written.
    kind: str = "local"
    # Seconds between checkpoints of a running scan; a killed scan goes on from the last one.
    checkpoint_every: float = 30.0
