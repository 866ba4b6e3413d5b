"""Settings of the cluster stage."""

from dataclasses import dataclass, field

from models.config import MoEShape

VERSION = 4

# What neurons can be compared by.
VIEWS = ("coactivation", "gate_rows", "contribution", "taylor_profile")
# Methods that compare neurons in these views.
COMPARING_METHODS = frozenset({"router_aware", "balanced_kmeans"})
# Views and methods that want a pass of the dense model over the calibration text.
STREAMED_VIEWS = frozenset({"contribution"})
STREAMED_METHODS = frozenset({"router_aware"})


@dataclass
class ClusterConfig:
    """How neurons are grouped into experts, and the map drawn of them."""

    # router_aware (from balanced_kmeans on, partition and router in turn, so that the chosen experts hold most of what
    # a token needs), balanced_kmeans (neurons that fire together), rank (dealt out in the order of
    # always_on_by), random, or contiguous (as stored).
    method: str = field(
        default="router_aware",
        metadata={"choices": ("router_aware", "balanced_kmeans", "rank", "random", "contiguous")},
    )
    # Calibration tokens that method=router_aware and always_on_by=alignment look at, at most; one number is kept of
    # each token and neuron.
    sample_tokens: int = field(default=8192, metadata={"minimum": 1})
    # What balanced_kmeans compares, and the map shows: coactivation (on which tokens a neuron fires), gate_rows (its
    # gate weights), contribution (how much it adds on which tokens; one more pass over the text), taylor_profile (to
    # which text domains it is important; needs scan.domains=true), or joint (all of joint_views).
    features: str = field(default="coactivation", metadata={"choices": (*VIEWS, "joint")})
    # features=joint: the views that are compared together, each with equal weight.
    joint_views: list[str] = field(default_factory=lambda: ["coactivation", "gate_rows"], metadata={"choices": VIEWS})
    # Directions kept of each view.
    feature_dims: int = field(default=64, metadata={"minimum": 1})
    # Most rounds of k-means, and of router_aware; each stops earlier when no neuron moves.
    iterations: int = field(default=20, metadata={"minimum": 1})
    # Times k-means is started, each time from other centroids; the grouping of the highest similarity is kept.
    restarts: int = field(default=1, metadata={"minimum": 1})
    # Tokens per forward batch, where something needs a pass over the calibration text.
    batch_tokens: int = field(default=4096, metadata={"minimum": 1})
    # What ranks the neurons: the highest stay on for every token, the lowest are dropped where experts have no room for
    # all, and method=rank deals the others out in this order. score (what stage=score ranks by: S_p unless score= says
    # otherwise) or alignment (what the aligned output loses without a neuron; one more pass over the text). The experts
    # of a pool get their neurons by score; alignment then chooses the always-on ones alone.
    always_on_by: str = field(default="score", metadata={"choices": ("score", "alignment")})
    # topology=global_pool: how many experts each layer gives to the pool. score: as its share of the E·N neurons that
    # stand highest by score, in standard deviations of their own layer (a score is comparable within a layer only);
    # contribution: as its share of the mean |h|·‖d‖ of all layers; equal: as many as any other, what is left over going
    # to the layers of the largest share by score.
    allocation: str = field(default="score", metadata={"choices": ("score", "contribution", "equal")})
    # Map of a layer's neurons as a picture: umap, tsne or none.
    map: str = field(default="umap", metadata={"choices": ("umap", "tsne", "none")})
    # Layers to draw, negative from the end; empty draws the first, the middle and the last.
    map_layers: list[int] = field(default_factory=list)
    # Neighbours that decide a neuron's place on the map (perplexity of tsne).
    map_neighbors: int = field(default=15, metadata={"minimum": 2})
    # Most neurons drawn; a wider layer shows an even sample.
    map_neurons: int = field(default=8192, metadata={"minimum": 10})

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

    def ranks(self, shape: MoEShape, width: int) -> bool:
        """Whether some neurons are always on, dropped or dealt out, so that `always_on_by` decides which."""
        others = not shape.pooled and (self.method == "rank" or drops(shape, width))
        return shape.always_on > 0 or others

    def reads_score(self, shape: MoEShape, width: int) -> bool:
        """Whether the score decides anything."""
        return shape.pooled or (self.always_on_by == "score" and self.ranks(shape, width))

    def aligns(self, shape: MoEShape, width: int) -> bool:
        """Whether neurons are ranked by alignment."""
        return self.always_on_by == "alignment" and self.ranks(shape, width)

    def needs_pass(self, shape: MoEShape, width: int) -> bool:
        """Whether a pass of the dense model over the calibration text is made."""
        viewed = self.looks_at_features and not STREAMED_VIEWS.isdisjoint(self.views)
        return viewed or self.method in STREAMED_METHODS or self.aligns(shape, width)

    def unread(self, shape: MoEShape, width: int) -> dict[str, str]:
        """Settings that nothing reads, and why."""
        found: dict[str, str] = {}
        if not self.ranks(shape, width):
            found["always_on_by"] = NOTHING_RANKED
        if self.method != "router_aware" and not self.aligns(shape, width):
            found["sample_tokens"] = f"cluster.method={self.method}"
        if not self.looks_at_features:
            reason = f"cluster.method={self.method} and cluster.map=none"
            found |= dict.fromkeys(("features", "joint_views", "feature_dims"), reason)
        elif self.features != "joint":
            found["joint_views"] = f"cluster.features={self.features}"
        if not self.groups_by_features:
            found |= dict.fromkeys(("iterations", "restarts"), f"cluster.method={self.method}")
        if not self.needs_pass(shape, width):
            found["batch_tokens"] = "no pass over the text is made"
        if not shape.pooled:
            found["allocation"] = f"topology={shape.topology}"
        if self.map == "none":
            found |= dict.fromkeys(("map_layers", "map_neighbors", "map_neurons"), "cluster.map=none")
        return found


# Why nobody asks what neurons are ranked by.
NOTHING_RANKED = "no neuron is always on or dropped"


def drops(shape: MoEShape, width: int) -> bool:
    """Whether the experts of a layer have no room for all its neurons that are not always on."""
    return shape.experts * shape.n < width - shape.always_on
