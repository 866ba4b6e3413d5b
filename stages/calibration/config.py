"""Random tokens in addition to the calibration text, and the names of the routers."""

from dataclasses import dataclass, field


@dataclass
class VocabularyConfig:
    """Random tokens in addition to the calibration text, for partition, routers and alignment.

    The first layers see little more than a token's identity, and the text contains few of the vocabulary's tokens.
    """

    tokens: int = field(default=16384, metadata={"minimum": 0})
    layers: int | None = field(default=12, metadata={"needs": {"tokens": True}, "minimum": 1})


def without_random_tokens() -> VocabularyConfig:
    """For pools: their experts serve all layers, and random tokens would favour the first at the others' cost."""
    return VocabularyConfig(tokens=0)


ROUTERS = ("error", "residual_ridge", "random")
# Routers that are a ridge regression or start from one; they are refitted when experts or inputs have changed.
FITTED_ROUTERS = frozenset({"error", "residual_ridge"})
# Routers that gradient descent can refine.
TRAINED_ROUTERS = frozenset({"error"})
# Routers for a pool, where most experts come from other layers.
POOL_ROUTERS = frozenset({"error", "random"})


def is_priced(router: str, *, pooled: bool) -> bool:
    """Whether `balance` applies to the router; in a pool it does not, since no layer should use all experts evenly."""
    return router in TRAINED_ROUTERS and not pooled
