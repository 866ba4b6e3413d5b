"""Settings of the cluster stage."""

from dataclasses import dataclass, field

VERSION = 1


@dataclass
class ClusterConfig:
    """How units are grouped into experts, and the map drawn of them."""

    # balanced_kmeans (units that fire together), rank (dealt out in score order), random, or contiguous (as stored).
    method: str = "balanced_kmeans"
    # What balanced_kmeans compares: coactivation (on which tokens a unit fires) or gate_rows (its gate weights).
    features: str = "coactivation"
    # Width that features are reduced to before clustering. At least 1.
    feature_dims: int = 256
    # Most rounds of k-means; it stops earlier when no unit moves. At least 1.
    iterations: int = 20
    # Which units stay on for every token: the highest by contribution, frequency or score (the chosen score).
    always_on_by: str = "contribution"
    # Map of the units of a layer as a picture: umap, tsne or none.
    map: str = "umap"
    # Layers to draw, negative from the end; empty draws the first, the middle and the last.
    map_layers: list[int] = field(default_factory=list)
    # Neighbours that decide a unit's place on the map (perplexity of tsne). At least 2.
    map_neighbors: int = 15
    # Most units drawn; a wider layer shows an even sample. At least 10.
    map_units: int = 8192
