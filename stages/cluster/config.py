"""Settings of the cluster stage."""

from dataclasses import dataclass, field

VERSION = 3

# What units can be compared by.
VIEWS = ("coactivation", "gate_rows", "contribution", "taylor_profile")
# Methods that compare units in these views.
COMPARING_METHODS = frozenset({"captured", "balanced_kmeans"})
# Views, methods and ways to choose always-on units that want a pass of the dense model over the calibration text.
STREAMED_VIEWS = frozenset({"contribution"})
STREAMED_METHODS = frozenset({"captured"})
STREAMED_CHOICES = frozenset({"alignment"})


@dataclass
class ClusterConfig:
    """How units are grouped into experts, and the map drawn of them."""

    # captured (from balanced_kmeans on, partition and router in turn, so that the chosen experts hold most of what a
    # token needs), balanced_kmeans (units that fire together), rank (dealt out in score order), random, or contiguous
    # (as stored).
    method: str = field(
        default="captured", metadata={"choices": ("captured", "balanced_kmeans", "rank", "random", "contiguous")}
    )
    # Calibration tokens that method=captured and always_on_by=alignment look at, at most; one number is kept of each
    # token and unit.
    sample_tokens: int = field(default=8192, metadata={"minimum": 1})
    # What balanced_kmeans compares, and the map shows: coactivation (on which tokens a unit fires), gate_rows (its gate
    # weights), contribution (how much it adds on which tokens; one more pass over the text), taylor_profile (to which
    # text domains it is important; needs scan.domains=true), or joint (all of joint_views).
    features: str = field(default="coactivation", metadata={"choices": (*VIEWS, "joint")})
    # features=joint: the views that are compared together, each with equal weight.
    joint_views: list[str] = field(default_factory=lambda: ["coactivation", "gate_rows"], metadata={"choices": VIEWS})
    # Directions kept of each view.
    feature_dims: int = field(default=64, metadata={"minimum": 1})
    # Most rounds of k-means, and of captured; each stops earlier when no unit moves.
    iterations: int = field(default=20, metadata={"minimum": 1})
    # Times k-means is started, each time from other centroids; the grouping of the highest similarity is kept.
    restarts: int = field(default=1, metadata={"minimum": 1})
    # Tokens per forward batch, where something needs a pass over the calibration text.
    batch_tokens: int = field(default=4096, metadata={"minimum": 1})
    # Which units stay on for every token, and which are dropped where experts have no room for all: alignment (by what
    # the aligned output loses without them), or by contribution, frequency or score (the chosen score; units are then
    # dropped by score).
    always_on_by: str = field(
        default="alignment", metadata={"choices": ("alignment", "contribution", "frequency", "score")}
    )
    # topology=global_pool: how many experts each layer gives to the pool. s_p: as its share of the E·N units that stand
    # highest by S_p, in standard deviations of their own layer (S_p itself is comparable within a layer only);
    # contribution: as its share of the mean |h|·‖d‖ of all layers; equal: as many as any other, what is left over going
    # to the layers of the largest share by s_p. Which units of a layer these are, its chosen score decides.
    allocation: str = field(
        default="s_p", metadata={"choices": ("s_p", "contribution", "equal"), "fingerprint": "unless default"}
    )
    # Map of a layer's units as a picture: umap, tsne or none.
    map: str = field(default="umap", metadata={"choices": ("umap", "tsne", "none")})
    # Layers to draw, negative from the end; empty draws the first, the middle and the last.
    map_layers: list[int] = field(default_factory=list)
    # Neighbours that decide a unit's place on the map (perplexity of tsne).
    map_neighbors: int = field(default=15, metadata={"minimum": 2})
    # Most units drawn; a wider layer shows an even sample.
    map_units: int = field(default=8192, metadata={"minimum": 10})

    @property
    def views(self) -> list[str]:
        """The views that `features` stands for."""
        return self.joint_views if self.features == "joint" else [self.features]

    @property
    def groups_by_features(self) -> bool:
        """Whether the method looks at features."""
        return self.method in COMPARING_METHODS

    @property
    def looks_at_features(self) -> bool:
        """Whether the method or the map does."""
        return self.groups_by_features or self.map != "none"

    @property
    def needs_pass(self) -> bool:
        """Whether a pass of the dense model over the calibration text is made."""
        viewed = self.looks_at_features and not STREAMED_VIEWS.isdisjoint(self.views)
        return viewed or self.method in STREAMED_METHODS or self.always_on_by in STREAMED_CHOICES
