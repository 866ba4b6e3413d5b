"""cluster: read statistics and scores, write the partition and maps of chosen layers."""

from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from models.checkpoint.reader import ShardReader
from models.config import ModelConfig
from models.errors import ConfigError
from models.families.dense import dense_family
from models.shape import Shape
from models.source import read_config, resolve_folder
from stages.cluster.config import ClusterConfig
from stages.cluster.features import coactivation_features, gate_row_features
from stages.cluster.layer import partition_layer
from stages.cluster.picture import draw_layer, layers_to_draw
from stages.cluster.report import describe, measure_layer, tabulate_layers
from stages.contracts.job import Job, Table
from stages.contracts.partition import Partition
from stages.contracts.scores import Scores
from stages.contracts.statistics import UnitStatistics

FEATURES, GROUPING, LAYOUT = range(3)  # what a layer's streams of random numbers are for


def run(job: Job, *, model: ModelConfig, cluster: ClusterConfig, shape: Shape, seed: int) -> Table:
    """Group the units of every layer into experts; no layer's draws depend on another layer."""
    statistics, scores = UnitStatistics.load(job.parents["scan"]), Scores.load(job.parents["score"])
    measure_LF = always_on_measure(scores, cluster.always_on_by)
    layers, width = measure_LF.shape
    drawn = layers_to_draw(cluster, layers)
    features = lru_cache(maxsize=1)(feature_source(statistics, model, cluster, seed))
    partitions, figures, pictures = [], [], []
    for layer in tqdm(range(layers), desc="cluster", unit="layer"):
        partition = partition_layer(
            measure_LF[layer],
            scores.chosen[layer],
            partial(features, layer),
            shape,
            method=cluster.method,  # type: ignore[arg-type] # checked against the choices beside the field
            iterations=cluster.iterations,
            rng=np.random.default_rng((seed, layer, GROUPING)),
        )
        partitions.append(partition)
        figures.append(measure_layer(partition, statistics, scores.contribution[layer], layer))
        if layer in drawn:
            rng = np.random.default_rng((seed, layer, LAYOUT))
            pictures.append(draw_layer(job.out, layer, partition, features(layer), scores, cluster, rng))
    Partition(
        width=width,
        units=torch.stack([partition.units_EN.int() for partition in partitions]),
        always_on=torch.stack([partition.roles.always_on_S.int() for partition in partitions]),
        description=describe(cluster, scores.method),
    ).save(job.out)
    return tabulate_layers(figures, cluster, scores.method, pictures)


def always_on_measure(scores: Scores, by: str) -> Tensor:
    """(L, F) what the always-on units are the highest of."""
    return {"contribution": scores.contribution, "frequency": scores.frequency, "score": scores.chosen}[by]


def feature_source(
    statistics: UnitStatistics, model: ModelConfig, cluster: ClusterConfig, seed: int
) -> Callable[[int], Tensor]:
    """What computes the (F, C) features of a layer."""
    if cluster.features == "coactivation":
        return partial(_read_coactivation, statistics, cluster.feature_dims, seed)
    return partial(_read_gate_rows, model, cluster.feature_dims, seed)


def _read_coactivation(statistics: UnitStatistics, dims: int, seed: int, layer: int) -> Tensor:
    if not statistics.reservoir_tokens:
        raise ConfigError(
            "the scan kept no activation bitmaps to compare units by",
            where="stage=cluster, setting cluster.features",
            do="scan.reservoir_tokens=4096, or cluster.features=gate_rows",
        )
    rng = np.random.default_rng((seed, layer, FEATURES))
    return coactivation_features(statistics.active_bits[layer], statistics.reservoir_tokens, dims=dims, rng=rng)


def _read_gate_rows(model: ModelConfig, dims: int, seed: int, layer: int) -> Tensor:
    folder = resolve_folder(model)
    with ShardReader(folder) as reader:
        gate_name, _up, _down = dense_family(read_config(folder)).ffn(layer)
        gate_FD = reader.tensor(gate_name)
    return gate_row_features(gate_FD, dims=dims, rng=np.random.default_rng((seed, layer, FEATURES)))
