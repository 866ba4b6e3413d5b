"""Random tokens in addition to the calibration text, and the names of the routers."""

from dataclasses import dataclass, field


@dataclass
class VocabularyConfig:
    """Random tokens in addition to the calibration text, for partition, routers and alignment.

    The first layers see little more than a token's identity, and the text contains few of the vocabulary's tokens.
    """

    tokens: int = field(default=16384, metadata={"minimum": 0})
    layers: int | None = field(default=12, metadata={"minimum": 1})

    def unread(self, *, pooled: bool) -> dict[str, str]:
        """Settings without effect → the reason."""
        if pooled:
            # A pool behaves like vocabulary=none.
            return dict.fromkeys(("tokens", "layers"), "topology=global_pool")
        return {} if self.tokens else {"layers": "vocabulary.tokens=0"}


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


def unread_of_descent(router: str, steps: int, stage: str) -> dict[str, str]:
    """Settings of a router's descent without effect in a stage → the reason."""
    if router not in TRAINED_ROUTERS:
        return dict.fromkeys(("router_steps", "router_rate"), f"assemble.router={router}")
    return {} if steps else {"router_rate": f"{stage}.router_steps=0"}


def is_priced(router: str, *, pooled: bool) -> bool:
    """Whether `balance` applies to the router; in a pool it does not, since no layer should use all experts evenly."""
    return router in TRAINED_ROUTERS and not pooled
