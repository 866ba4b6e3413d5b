"""Settings of the extraction."""

from dataclasses import dataclass, field

VERSION = 3


@dataclass
class ExtractConfig:
    """How neurons are copied from the dense checkpoint, in its number format; explained in conf/extract."""

    verify: bool = field(default=True, metadata={"fingerprint": False})
