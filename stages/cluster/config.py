"""Settings of the cluster stage."""

from dataclasses import dataclass, field

from models.config import MoEShape

VERSION = 8


@dataclass
class ClusterConfig:
    """How neurons are grouped into experts and drawn as maps; explained in conf/cluster."""

    method: str = field(
        default="router_aware",
        metadata={"choices": ("router_aware", "balanced_kmeans", "rank", "random", "contiguous")},
    )
    sample_tokens: int = field(default=8192, metadata={"minimum": 1})
    features: str = field(default="coactivation", metadata={"choices": ("coactivation", "gate_rows")})
    batch_tokens: int = field(default=4096, metadata={"minimum": 1})
    always_on_by: str = field(default="score", metadata={"choices": ("score", "alignment")})
    map: str = field(default="umap", metadata={"choices": ("umap", "tsne", "none"), "fingerprint": False})
    map_layers: list[int] = field(
        default_factory=list, metadata={"needs": {"map": ("umap", "tsne")}, "fingerprint": False}
    )

    def ranks(self, shape: MoEShape, width: int) -> bool:
        """Whether neurons are ranked: to be always on, dropped, or dealt out by method rank."""
        others = not shape.pooled and (self.method == "rank" or drops(shape, width))
        return shape.always_on > 0 or others

    def reads_score(self, shape: MoEShape, width: int) -> bool:
        """Whether the result depends on the score."""
        return shape.pooled or (self.always_on_by == "score" and self.ranks(shape, width))

    def aligns(self, shape: MoEShape, width: int) -> bool:
        """Whether neurons are ranked by alignment."""
        return self.always_on_by == "alignment" and self.ranks(shape, width)

    def needs_pass(self, shape: MoEShape, width: int) -> bool:
        """Whether the stage runs the dense model over the calibration text."""
        return self.method == "router_aware" or self.aligns(shape, width)


# Reason why the score has no effect.
NOTHING_RANKED = "no neuron is always on or dropped"


def drops(shape: MoEShape, width: int) -> bool:
    """Whether a layer has more routed neurons than its experts can hold, so that some are dropped."""
    return shape.experts * shape.n < width - shape.always_on
