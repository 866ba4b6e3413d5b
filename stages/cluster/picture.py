"""Maps of chosen layers: each neuron's expert, score and firing frequency."""

import warnings
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from sklearn.manifold import TSNE
from sklearn.neighbors import NearestNeighbors
from torch import Tensor
from torch.nn.functional import normalize

from stages.cluster.config import ClusterConfig
from stages.cluster.layer import ALWAYS_ON, DROPPED, LAYOUT, LayerEvidence, LayerPartition

# More experts than colours repeat them; always-on and dropped neurons are grey.
COLOURS = [rgb for rgb in colormaps["tab20"].colors if max(rgb) - min(rgb) > 0.01]  # type: ignore[attr-defined]


@dataclass(frozen=True)
class NeuronMap:
    """The data of one picture, per neuron."""

    coordinates_U2: Float[Tensor, "U 2"]
    home_U: Int[Tensor, "U"]  # an expert, ALWAYS_ON or DROPPED
    score_U: Float[Tensor, "U"]
    score: str  # its name
    frequency_U: Float[Tensor, "U"]
    experts: int


def plot_neuron_map(neurons: NeuronMap, *, title: str) -> bytes:
    """A PNG of three panels; the same input and libraries give the same bytes."""
    figure = Figure(figsize=(20, 6.8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=16)
    by_expert, by_score, by_frequency = figure.subplots(1, 3)
    _plot_experts(by_expert, neurons)
    name = "S_p" if neurons.score == "s_p" else neurons.score
    _plot_measure(by_score, neurons, neurons.score_U, Normalize(*_middle(neurons.score_U)), name)
    low, high = _middle(neurons.frequency_U[neurons.frequency_U > 0])
    shown_U = neurons.frequency_U.clamp_min(low / 2)  # a neuron that never fires has no logarithm
    _plot_measure(by_frequency, neurons, shown_U, LogNorm(low, high), "share of tokens the neuron is active on")
    for panel, heading in ((by_expert, "Expert"), (by_score, "Score"), (by_frequency, "Frequency")):
        panel.set_title(heading, fontsize=14)
        panel.set(xticks=[], yticks=[])
    png = BytesIO()
    figure.savefig(png, format="png", metadata={"Software": None})
    return png.getvalue()


def _middle(values: Tensor) -> tuple[float, float]:
    """Bounds of the colour scale; the lowest and the highest 5 % share the colour of their end."""
    if not len(values):
        return 0.01, 1.0
    low, high = np.quantile(values.numpy(), (0.05, 0.95)).tolist()
    return (low, high) if high > low else (low, low + 1.0)


def _plot_measure(panel: Axes, neurons: NeuronMap, values_U: Tensor, scale: Normalize, label: str) -> None:
    """Colour by a measure; the highest values are drawn on top."""
    order_U = values_U.argsort(stable=True)
    x_U, y_U = neurons.coordinates_U2[order_U].T.numpy()
    dots = panel.scatter(x_U, y_U, c=values_U[order_U].numpy(), s=_dot_area(neurons), cmap="viridis", norm=scale)
    bar = panel.figure.colorbar(dots, ax=panel, extend="both", shrink=0.85)
    bar.set_label(label, fontsize=12)


def _plot_experts(panel: Axes, neurons: NeuronMap) -> None:
    """Colour by expert; the legend lists all experts if there are few."""
    named = neurons.experts <= len(COLOURS)
    handles = []
    homes: list[tuple[int, str, Any]] = [(DROPPED, "dropped", "#dddddd"), (ALWAYS_ON, "always on", "#666666")]
    homes += [(e, f"expert {e}", COLOURS[e % len(COLOURS)]) for e in range(neurons.experts)]
    for home, name, colour in homes:
        points_U2 = neurons.coordinates_U2[neurons.home_U == home].numpy()
        if not len(points_U2):
            continue
        panel.scatter(points_U2[:, 0], points_U2[:, 1], color=colour, s=_dot_area(neurons))
        if named or home < 0:
            handles.append(Line2D([], [], marker="o", linestyle="", color=colour, label=f"{name} ({len(points_U2)})"))
    if not named:
        handles.append(Line2D([], [], linestyle="", label=f"{neurons.experts} experts,\ncolours repeat"))
    panel.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, labelspacing=0.3,
        handletextpad=0.1, fontsize=10,
    )  # fmt: skip


def _dot_area(neurons: NeuronMap) -> float:
    """Area of a dot in points², smaller for more neurons."""
    return float(np.clip(24000 / len(neurons.home_U), 3.0, 40.0))


MOST_DIMS = 50  # principal components that both methods use

Points = NDArray[np.float32]


def place_neurons(
    features_UC: Float[Tensor, "U C"], method: Literal["umap", "tsne"], *, neighbors: int, rng: np.random.Generator
) -> Float[Tensor, "U 2"]:
    """Coordinates of 4 or more neurons: neighbours by cosine stay neighbours, large distances mean little.

    A zero row is a neuron without direction. `neighbors` (umap) or the perplexity (tsne) is lowered for few neurons.
    The same `rng` gives the same picture on the same machine.
    """
    points_UP = principal_points(features_UC)
    start_U2 = 1e-3 * rng.standard_normal((len(points_UP), 2), dtype=np.float32)  # separates equal neurons
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
    """UMAP on exact neighbours: this compiles in half the time of umap's own neighbour search."""
    neighbors, threads = min(neighbors, len(points_UP) - 1), torch.get_num_threads()
    distances_UQ, nearest_UQ = NearestNeighbors(n_neighbors=neighbors).fit(points_UP).kneighbors(points_UP)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Tensorflow not installed", ImportWarning)
        warnings.filterwarnings("ignore", r"precomputed_knn\[2\]", UserWarning)
        from umap import UMAP  # noqa: PLC0415 - takes seconds, and only maps need it

        layout = UMAP(
            n_neighbors=neighbors,
            precomputed_knn=(nearest_UQ, distances_UQ),
            init=start_U2,
            random_state=seed,
            n_jobs=1,
        )
        placed_U2: Points = layout.fit_transform(points_UP)
    torch.set_num_threads(threads)  # numba changes it for the process, and so the rounding of later results
    return placed_U2


def place_by_tsne(points_UP: Points, start_U2: Points, neighbors: int, *, seed: int) -> Points:
    """t-SNE of perplexity `neighbors`, lowered for few neurons."""
    perplexity = min(float(neighbors), (len(points_UP) - 1) / 3)
    start_U2 = 1e-4 * start_U2 / start_U2.std()  # t-SNE expects very small initial coordinates
    placed_U2: Points = TSNE(perplexity=perplexity, init=start_U2, random_state=seed).fit_transform(points_UP)
    return placed_U2


MAP_NEURONS = 8192  # drawn at most, evenly spaced over the layer
MAP_NEIGHBORS = 15  # neighbours in UMAP, perplexity in t-SNE
MAP_NAMES = {"umap": "UMAP", "tsne": "t-SNE"}


def plot_layer(
    partition: LayerPartition, features_FC: Float[Tensor, "F C"], evidence: LayerEvidence, cluster: ClusterConfig
) -> dict[str, bytes]:
    """The map of one layer: file name → PNG."""
    layer, width = evidence.layer, len(features_FC)
    shown = torch.from_numpy(np.linspace(0, width - 1, min(width, MAP_NEURONS)).round().astype(np.int64))
    coordinates_U2 = place_neurons(
        features_FC[shown],
        cluster.map,  # type: ignore[arg-type] # checked against the field's choices
        neighbors=MAP_NEIGHBORS,
        rng=evidence.draw(LAYOUT),
    )
    experts, size = partition.neurons_EN.shape
    # Without a score: contribution.
    scores, frequency_U = evidence.scores, evidence.statistics.frequency[layer, shown]
    name, score_F = ("contribution", evidence.contribution_F) if scores is None else (scores.method, evidence.score_F)
    picture = NeuronMap(coordinates_U2, partition.home_F[shown], score_F[shown], name, frequency_U, experts)
    neurons = f"{width} neurons" if len(shown) == width else f"{len(shown)} of {width} neurons"
    copies = ", coloured by first home" if experts * size > len(partition.routed_U) else ""
    source = f"{MAP_NAMES[cluster.map]} of co-activation"
    png = plot_neuron_map(picture, title=f"Layer {layer}: {neurons}, {experts} experts of {size}{copies} ({source})")
    return {f"neuron_map_layer_{layer:03}.png": png}
