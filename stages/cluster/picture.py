"""Pictures of chosen layers."""

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from models.errors import ConfigError
from stages.cluster.config import ClusterConfig
from stages.cluster.evidence import LayerEvidence
from stages.cluster.layer import LayerPartition
from stages.cluster.map import place_units
from stages.cluster.views import name_views
from stages.plots.unit_map import UnitMap, draw_unit_map

MAP_NAMES = {"umap": "UMAP", "tsne": "t-SNE"}


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


def draw_layer(
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
    shown = torch.from_numpy(np.linspace(0, width - 1, min(width, cluster.map_units)).round().astype(np.int64))
    coordinates_U2 = place_units(
        features_FC[shown],
        cluster.map,  # type: ignore[arg-type] # checked against the choices beside the field
        neighbors=cluster.map_neighbors,
        rng=rng,
    )
    experts, size = partition.units_EN.shape
    # What no neuron was ranked by is not shown.
    scores, frequency_U = evidence.scores, evidence.statistics.frequency[layer, shown]
    name, score_F = ("contribution", evidence.contribution_F) if scores is None else (scores.method, evidence.score_F)
    picture = UnitMap(coordinates_U2, partition.home_F[shown], score_F[shown], name, frequency_U, experts)
    file = f"unit_map_layer_{layer:03}.png"
    units = f"{width} units" if len(shown) == width else f"{len(shown)} of {width} units"
    copies = ", coloured by first home" if experts * size > len(partition.roles.routed_U) else ""
    draw_unit_map(
        picture,
        folder / file,
        title=f"Layer {layer}: {units}, {experts} experts of {size}{copies} "
        f"({MAP_NAMES[cluster.map]} of {name_views(cluster)})",
    )
    return file
