"""Settings of the extraction."""

from dataclasses import dataclass, field

VERSION = 2


@dataclass
class ExtractConfig:
    """How neurons are copied out of the dense checkpoint. They keep its number format."""

    # Read every file again and compare it with the dense weights, bit for bit.
    verify: bool = field(default=True, metadata={"fingerprint": False})
