"""Names of the routers."""

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
