"""Pictures of chosen layers."""

import warnings
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from sklearn.manifold import TSNE
from sklearn.neighbors import NearestNeighbors
from torch import Tensor
from torch.nn.functional import normalize

from instruments.errors import ConfigError
from stages.cluster.config import ClusterConfig
from stages.cluster.evidence import LayerEvidence
from stages.cluster.layer import LayerPartition
from stages.cluster.neuron_map import NeuronMap, draw_neuron_map

MOST_DIMS = 50  # principal components in which both methods compare neurons

Points = NDArray[np.float32]


def place_neurons(
    features_UC: Float[Tensor, "U C"], method: Literal["umap", "tsne"], *, neighbors: int, rng: np.random.Generator
) -> Float[Tensor, "U 2"]:
    """Coordinates for a picture: neighbours by cosine stay neighbours, distances far apart mean little.

    Args:
        features_UC: ``(U, C)`` finite, U at least 4; a zero row is a neuron without direction.
        method: umap or tsne.
        neighbors: neighbours (umap) or perplexity (tsne), lowered where there are too few neurons.
        rng: of this picture; the same stream gives the same picture on the same machine.
    Returns:
        ``(U, 2)`` fp32.
    """
    points_UP = principal_points(features_UC)
    start_U2 = 1e-3 * rng.standard_normal((len(points_UP), 2), dtype=np.float32)  # tells neurons apart that are alike
    start_U2[:, : points_UP.shape[1]] += points_UP[:, :2]
    place = place_by_umap if method == "umap" else place_by_tsne
    placed_U2 = place(points_UP, start_U2, neighbors, seed=int(rng.integers(2**31)))
    return torch.from_numpy(placed_U2.astype(np.float32))


def principal_points(features_UC: Float[Tensor, "U C"]) -> Points:
    """Directions of the neurons along their principal components, (U, P)."""
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
    """t-SNE with as high a perplexity as its number of neurons allows."""
    perplexity = min(float(neighbors), (len(points_UP) - 1) / 3)
    start_U2 = 1e-4 * start_U2 / start_U2.std()  # it wants to start from a point, all but
    placed_U2: Points = TSNE(perplexity=perplexity, init=start_U2, random_state=seed).fit_transform(points_UP)
    return placed_U2


MAP_NEURONS = 8192  # a wider layer shows an even sample
MAP_NEIGHBORS = 15  # that decide a neuron's place; perplexity of t-SNE
MAP_NAMES = {"umap": "UMAP", "tsne": "t-SNE"}
FEATURE_NAMES = {"coactivation": "co-activation", "gate_rows": "gate rows"}


def layers_to_draw(cluster: ClusterConfig, layers: int) -> list[int]:
    """Layers whose map is wanted, ascending. Raises ConfigError: no such layer."""
    if cluster.map == "none":
        return []
    wanted = cluster.map_layers or [0, layers // 2, -1]
    if unknown := [layer for layer in wanted if not -layers <= layer < layers]:
        raise ConfigError(
            f"no layer {', '.join(map(str, unknown))}: the model has {layers}",
            where="setting cluster.map_layers",
            do="cluster.map_layers=[] for the first, the middle and the last",
        )
    return sorted({layer % layers for layer in wanted})


def plot_layer(
    folder: Path,
    layer: int,
    partition: LayerPartition,
    features_FC: Float[Tensor, "F C"],
    evidence: LayerEvidence,
    cluster: ClusterConfig,
    rng: np.random.Generator,
) -> str:
    """Write the map of one layer; returns the file's name."""
    width = len(features_FC)
    shown = torch.from_numpy(np.linspace(0, width - 1, min(width, MAP_NEURONS)).round().astype(np.int64))
    coordinates_U2 = place_neurons(
        features_FC[shown],
        cluster.map,  # type: ignore[arg-type] # checked against the choices beside the field
        neighbors=MAP_NEIGHBORS,
        rng=rng,
    )
    experts, size = partition.neurons_EN.shape
    # What no neuron was ranked by is not shown.
    scores, frequency_U = evidence.scores, evidence.statistics.frequency[layer, shown]
    name, score_F = ("contribution", evidence.contribution_F) if scores is None else (scores.method, evidence.score_F)
    picture = NeuronMap(coordinates_U2, partition.home_F[shown], score_F[shown], name, frequency_U, experts)
    file = f"neuron_map_layer_{layer:03}.png"
    neurons = f"{width} neurons" if len(shown) == width else f"{len(shown)} of {width} neurons"
    copies = ", coloured by first home" if experts * size > len(partition.roles.routed_U) else ""
    draw_neuron_map(
        picture,
        folder / file,
        title=f"Layer {layer}: {neurons}, {experts} experts of {size}{copies} "
        f"({MAP_NAMES[cluster.map]} of {FEATURE_NAMES[cluster.features]})",
    )
    return file
