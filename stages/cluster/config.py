"""Settings of the cluster stage."""

from dataclasses import dataclass, field

VERSION = 1


@dataclass
class ClusterConfig:
    """How units are grouped into experts, and the map drawn of them."""

    # balanced_kmeans (units that fire together), rank (dealt out in score order), random, or contiguous (as stored).
    method: str = field(
        default="balanced_kmeans", metadata={"choices": ("balanced_kmeans", "rank", "random", "contiguous")}
    )
    # What balanced_kmeans compares, and the map shows: coactivation (on which tokens a unit fires) or gate_rows (its
    # gate weights).
    features: str = field(default="coactivation", metadata={"choices": ("coactivation", "gate_rows")})
    # Directions kept of those features.
    feature_dims: int = field(default=64, metadata={"minimum": 1})
    # Most rounds of k-means; it stops earlier when no unit moves.
    iterations: int = field(default=20, metadata={"minimum": 1})
    # Which units stay on for every token: the highest by contribution, frequency or score (the chosen score).
    always_on_by: str = field(default="contribution", metadata={"choices": ("contribution", "frequency", "score")})
    # Map of a layer's units as a picture: umap, tsne or none.
    map: str = field(default="umap", metadata={"choices": ("umap", "tsne", "none")})
    # Layers to draw, negative from the end; empty draws the first, the middle and the last.
    map_layers: list[int] = field(default_factory=list)
    # Neighbours that decide a unit's place on the map (perplexity of tsne).
    map_neighbors: int = field(default=15, metadata={"minimum": 2})
    # Most units drawn; a wider layer shows an even sample.
    map_units: int = field(default=8192, metadata={"minimum": 10})
