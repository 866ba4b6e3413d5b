"""Places units on a plane so that units with like features lie close."""

from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from sklearn.decomposition import PCA
from torch import Tensor
from torch.nn.functional import normalize

MOST_DIMS = 50  # both methods compare units in at most this many principal components


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
    units, width = directions_UC.shape
    reduced_UC = PCA(min(MOST_DIMS, units, width), svd_solver="full").fit_transform(directions_UC)
    seed = int(rng.integers(2**31))
    place = _place_by_umap if method == "umap" else _place_by_tsne
    return torch.from_numpy(place(reduced_UC, neighbors, seed).astype(np.float32))


def _place_by_umap(points_UC: np.ndarray, neighbors: int, seed: int) -> np.ndarray:
    from umap import UMAP  # compiles at import: seconds that only a map should cost

    layout = UMAP(n_neighbors=min(neighbors, len(points_UC) - 1), init="pca", random_state=seed, n_jobs=1)
    return np.asarray(layout.fit_transform(points_UC))


def _place_by_tsne(points_UC: np.ndarray, neighbors: int, seed: int) -> np.ndarray:
    from sklearn.manifold import TSNE

    perplexity = min(float(neighbors), (len(points_UC) - 1) / 3)
    return np.asarray(TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(points_UC))
