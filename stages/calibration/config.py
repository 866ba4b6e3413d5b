"""Settings of the vocabulary pass: what the fits see beside the text."""

from dataclasses import dataclass, field


@dataclass
class VocabularyConfig:
    """Random tokens beside the calibration text, for partition, routers and alignment.

    The first layers know little more of a token than which one it is, and the text has met few of them.
    """

    # Drawn from what the text has not, at most as many as it has; 0 draws none, nor does a pool, whatever stands here.
    tokens: int = field(default=16384, metadata={"minimum": 0})
    # They pass so many layers, from the first on; unset: all.
    layers: int | None = field(default=12, metadata={"minimum": 1})

    def unread(self, *, pooled: bool) -> dict[str, str]:
        """Settings that nothing reads, and why."""
        if pooled:
            # vocabulary=none says what a pool does.
            return dict.fromkeys(("tokens", "layers"), "topology=global_pool")
        return {} if self.tokens else {"layers": "vocabulary.tokens=0"}


def without_random_tokens() -> VocabularyConfig:
    """What a pool's stages are given: its experts serve every layer, and the first would be served at their cost."""
    return VocabularyConfig(tokens=0)
