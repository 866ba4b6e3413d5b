"""Settings of the vocabulary pass: what the fits see beside the text."""

from dataclasses import dataclass, field


@dataclass
class VocabularyConfig:
    """Random tokens beside the calibration text, for partition, routers and alignment.

    The first layers know little more of a token than which one it is, and the text has met few of them.
    """

    # Tokens drawn from those of the vocabulary that the text has not, at most as many as it has; 0 draws none.
    tokens: int = field(default=16384, metadata={"minimum": 0})
    # They pass so many layers, from the first on; unset: all. A pool sees none of them.
    layers: int | None = field(default=4, metadata={"minimum": 1})
