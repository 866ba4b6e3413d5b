"""Settings of the fits: random tokens in addition to the text, and the names of the routers."""

from dataclasses import dataclass, field


@dataclass
class VocabularyConfig:
    """Random tokens in addition to the calibration text, for partition, routers and alignment.

    The first layers know little more of a token than which one it is, and the text has met few of them.
    """

    tokens: int = field(default=16384, metadata={"minimum": 0})
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


ROUTERS = ("error", "residual_ridge", "random")
# Those that are a ridge regression, or start from one; they are fitted again when experts or inputs have changed.
FITTED_ROUTERS = frozenset({"error", "residual_ridge"})
# Those that gradient descent goes on from.
TRAINED_ROUTERS = frozenset({"error"})
# Those that can choose among a pool's experts, most of them cut from other layers.
POOL_ROUTERS = frozenset({"error", "random"})


def is_priced(router: str, *, pooled: bool) -> bool:
    """Whether the router can pay for uneven load; no layer of a pool is to use all experts alike."""
    return router in TRAINED_ROUTERS and not pooled
