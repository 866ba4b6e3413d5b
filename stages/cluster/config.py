"""Settings of the cluster stage."""

from dataclasses import dataclass, field

from models.config import MoEShape

VERSION = 11


@dataclass
class ClusterConfig:
    """How neurons are grouped into experts and drawn as maps; explained in conf/cluster."""

    method: str = field(
        default="router_aware",
        metadata={"choices": ("router_aware", "balanced_kmeans", "rank", "random", "contiguous")},
    )
    sample_tokens: int = field(default=8192, metadata={"minimum": 1})
    map: str = field(default="tsne", metadata={"choices": ("tsne", "umap", "none"), "fingerprint": False})
    map_layers: list[int] = field(
        default_factory=list, metadata={"needs": {"map": ("tsne", "umap")}, "fingerprint": False}
    )

    def reads_score(self, shape: MoEShape, width: int) -> bool:
        """Whether the score decides anything: which neurons are always on, dropped, dealt out, or in a pool."""
        return shape.pooled or shape.always_on > 0 or self.method == "rank" or drops(shape, width)


def drops(shape: MoEShape, width: int) -> bool:
    """Whether a layer has more routed neurons than its experts can hold, so that some are dropped."""
    return shape.experts * shape.n < width - shape.always_on
