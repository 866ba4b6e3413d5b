"""Settings of the extraction."""

from dataclasses import dataclass

VERSION = 1


@dataclass
class ExtractConfig:
    """How units are copied out of the dense checkpoint. They keep its number format."""

    # Read every file again and compare it with the dense weights, bit for bit.
    verify: bool = True
