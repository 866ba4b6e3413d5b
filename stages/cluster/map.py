"""Places units on a plane so that units with like features lie close."""

import warnings
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
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
        rng: of this picture; the same stream gives the same picture on the same machine.
    Returns:
        ``(U, 2)`` fp32.
    """
    points_UP = principal_points(features_UC)
    start_U2 = 1e-3 * rng.standard_normal((len(points_UP), 2), dtype=np.float32)  # tells units apart that are alike
    start_U2[:, : points_UP.shape[1]] += points_UP[:, :2]
    place = place_by_umap if method == "umap" else place_by_tsne
    placed_U2 = place(points_UP, start_U2, neighbors, seed=int(rng.integers(2**31)))
    return torch.from_numpy(placed_U2.astype(np.float32))


def principal_points(features_UC: Float[Tensor, "U C"]) -> Points:
    """Directions of the units along their principal components, (U, P)."""
    directions_UC = normalize(features_UC, dim=1)
    left_UP, spread_P, _right = torch.linalg.svd(directions_UC - directions_UC.mean(0), full_matrices=False)
    points_UP: Points = (left_UP * spread_P)[:, :MOST_DIMS].numpy()
    return points_UP


def place_by_umap(points_UP: Points, start_U2: Points, neighbors: int, *, seed: int) -> Points:
    """UMAP on exact neighbours, which compiles in half the time of its own search."""
    neighbors, threads = min(neighbors, len(points_UP) - 1), torch.get_num_threads()
    distances_UQ, nearest_UQ = NearestNeighbors(n_neighbors=neighbors).fit(points_UP).kneighbors(points_UP)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Tensorflow not installed", ImportWarning)
        warnings.filterwarnings("ignore", r"precomputed_knn\[2\]", UserWarning)
        from umap import UMAP  # noqa: PLC0415 - seconds that only a map should cost

        layout = UMAP(
            n_neighbors=neighbors,
            precomputed_knn=(nearest_UQ, distances_UQ),
            init=start_U2,
            random_state=seed,
            n_jobs=1,
        )
        placed_U2: Points = layout.fit_transform(points_UP)
    torch.set_num_threads(threads)  # numba changes it for the whole process, and with it the rounding of what follows
    return placed_U2


def place_by_tsne(points_UP: Points, start_U2: Points, neighbors: int, *, seed: int) -> Points:
    """t-SNE with as high a perplexity as its number of units allows."""
    perplexity = min(float(neighbors), (len(points_UP) - 1) / 3)
    start_U2 = 1e-4 * start_U2 / start_U2.std()  # it wants to start from a point, all but
    placed_U2: Points = TSNE(perplexity=perplexity, init=start_U2, random_state=seed).fit_transform(points_UP)
    return placed_U2
