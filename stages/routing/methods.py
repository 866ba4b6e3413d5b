"""Names of the routers, by what they are fitted to."""

ROUTERS = (
    "error",
    "logistic",
    "residual_ridge",
    "log_ridge",
    "ridge",
    "centroid",
    "representative",
    "gate_rows",
    "random",
)
# Those that gradient descent goes on from.
TRAINED_ROUTERS = frozenset({"error", "logistic"})
# Those that look at what every expert contributes.
IMITATING_ROUTERS = frozenset({"centroid", "ridge", "logistic"})
# Those that are a ridge regression, or start from one ...
RIDGE_ROUTERS = frozenset({"error", "residual_ridge", "log_ridge", "ridge", "logistic"})
# ... and those that are fitted on a limited number of tokens.
SAMPLED_ROUTERS = frozenset({"error", "residual_ridge", "logistic"})
# Those that a pool's experts can be chosen by: fitted to what each does for the layer, or to nothing.
POOL_ROUTERS = frozenset({"error", "logistic", "ridge", "centroid", "random"})


def is_refitted(router: str, *, pooled: bool) -> bool:
    """Whether the router is fitted again when experts or inputs have changed."""
    return router != "random" if pooled else router in RIDGE_ROUTERS


def is_priced(router: str, *, pooled: bool) -> bool:
    """Whether the router can pay for uneven load; no layer of a pool is to use all experts alike."""
    return router in TRAINED_ROUTERS and not pooled
