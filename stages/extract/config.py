"""Settings of the extraction."""

from dataclasses import dataclass

VERSION = 1


@dataclass
class ExtractConfig:
    """How units are copied out of the dense checkpoint."""

    # Number format of the experts: source (bit for bit), float32, bfloat16, float16.
    dtype: str = "source"
