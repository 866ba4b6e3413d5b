"""Places units on a plane so that units with like features lie close."""

import warnings
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE
from sklearn.neighbors import NearestNeighbors
from torch import Tensor
from torch.nn.functional import normalize

MOST_DIMS = 50  # principal components in which both methods compare units

Points = NDArray[np.float32]


def place_units(
    features_UC: Float[Tensor, "U C"], method: Literal["umap", "tsne"], *, neighbors: int, rng: np.random.Generator
) -> Float[Tensor, "U 2"]:
    """Coordinates for a picture: neighbours by cosine stay neighbours, distances far apart mean little.

    Args:
        features_UC: ``(U, C)`` finite, U at least 4; a zero row is a unit without direction.
        method: umap or tsne.
        neighbors: neighbours (umap) or perplexity (tsne), lowered where there are too few units.
        rng: draws the seed of the layout; the same seed gives the same layout on the same machine.
    Returns:
        ``(U, 2)`` fp32.
    """
    directions_UC = normalize(features_UC, dim=1).numpy()
    components = min(MOST_DIMS, *directions_UC.shape)
    points_UC = PCA(components, svd_solver="full").fit_transform(directions_UC).astype(np.float32)
    place = place_by_umap if method == "umap" else place_by_tsne
    return torch.from_numpy(place(points_UC, neighbors, int(rng.integers(2**31))).astype(np.float32))


def place_by_umap(points_UC: Points, neighbors: int, seed: int) -> Points:
    """UMAP on exact neighbours, which compiles in half the time of its own search."""
    neighbors = min(neighbors, len(points_UC) - 1)
    distances_UQ, nearest_UQ = NearestNeighbors(n_neighbors=neighbors).fit(points_UC).kneighbors(points_UC)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Tensorflow not installed", ImportWarning)
        warnings.filterwarnings("ignore", r"precomputed_knn\[2\]", UserWarning)
        from umap import UMAP  # seconds that only a map should cost  # noqa: PLC0415

        layout = UMAP(
            n_neighbors=neighbors,
            precomputed_knn=(nearest_UQ, distances_UQ),
            init="pca",
            random_state=seed,
            n_jobs=1,
        )
        placed_U2: Points = layout.fit_transform(points_UC)
    return placed_U2


def place_by_tsne(points_UC: Points, neighbors: int, seed: int) -> Points:
    """t-SNE with the perplexity its number of units allows."""
    perplexity = min(float(neighbors), (len(points_UC) - 1) / 3)
    placed_U2: Points = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(points_UC)
    return placed_U2
