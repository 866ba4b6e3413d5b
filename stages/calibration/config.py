"""Random tokens in addition to the calibration text."""

from dataclasses import dataclass, field


@dataclass
class VocabularyConfig:
    """Random tokens in addition to the calibration text, for partition, routers and alignment.

    The first layers see little more than a token's identity, and the text contains few of the vocabulary's tokens.
    """

    tokens: int = field(default=16384, metadata={"minimum": 0})
    layers: int | None = field(default=12, metadata={"needs": {"tokens": True}, "minimum": 1})
