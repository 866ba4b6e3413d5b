"""cluster: read statistics and scores, write the partition and maps of chosen layers."""

from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from itertools import repeat
from pathlib import Path

import torch
from tqdm import tqdm

from models.config import ModelConfig, MoEShape
from models.loading import release_freed_memory
from stages.artifacts.carve import Partition, PoolPartition
from stages.artifacts.job import Job, Table
from stages.artifacts.statistics import NeuronStatistics, Scores
from stages.artifacts.tensor_file import load_layer_checkpoint, save_layer_checkpoint
from stages.calibration.config import VocabularyConfig
from stages.cluster.config import ClusterConfig
from stages.cluster.evidence import (
    GROUPING,
    LAYOUT,
    LayerActivity,
    LayerEvidence,
    open_activities,
    rank_neurons,
    view_neurons,
)
from stages.cluster.layer import LayerPartition, layer_shapes, partition_layer
from stages.cluster.picture import layers_to_draw, plot_layer
from stages.cluster.report import describe, measure_layer, tabulate_layers
from stages.text.config import DataConfig


def run(
    job: Job,
    *,
    model: ModelConfig,
    data: DataConfig,
    vocabulary: VocabularyConfig,
    cluster: ClusterConfig,
    shape: MoEShape,
    seed: int,
) -> Table:
    """Group the neurons of every layer into experts; no layer's draws depend on another layer."""
    statistics = NeuronStatistics.load(job.parents["scan"])
    layers, width = statistics.sum_abs.shape
    scores = Scores.load(job.parents["score"]) if cluster.reads_score(shape, width) else None
    drawn = layers_to_draw(cluster, layers)
    shapes = [shape] * layers
    if shape.pooled:
        assert scores is not None, "a pool reads the score, see config.py"
        shapes = layer_shapes(shape, scores.chosen)
    partitions, figures, pictures = [], [], []
    activities: Iterable[LayerActivity | None] = repeat(None, layers)
    if cluster.needs_pass(shape, width):
        activities = open_activities(model, data, vocabulary, cluster.batch_tokens)
    for layer, activity in enumerate(tqdm(activities, total=layers, desc="cluster", unit="layer")):
        evidence = LayerEvidence(layer, model, statistics, scores, seed, activity)
        features = lru_cache(maxsize=1)(partial(view_neurons, cluster, evidence))
        partition = load_layer_checkpoint(job.scratch, layer, LayerPartition)
        if partition is None:
            partition = partition_layer(
                *rank_neurons(cluster, evidence, shapes[layer]),
                features,
                shapes[layer],
                method=cluster.method,  # type: ignore[arg-type] # checked against the choices beside the field
                rng=evidence.draw(GROUPING),
                evidence=evidence,
                tokens=cluster.sample_tokens,
            )
            save_layer_checkpoint(job.scratch, layer, partition)
        partitions.append(partition)
        figures.append(measure_layer(partition, evidence, features() if cluster.groups_by_features else None))
        if layer in drawn and shapes[layer].experts:
            rng = evidence.draw(LAYOUT)
            pictures.append(plot_layer(job.out, layer, partition, features(), evidence, cluster, rng))
    release_freed_memory()
    description = describe(cluster, shape, width, scores.description if scores else None)
    save_partition(job.out, partitions, shape, width, description)
    return tabulate_layers(figures, cluster, description, pictures, shapes if shape.pooled else ())


def save_partition(
    folder: Path, partitions: Sequence[LayerPartition], shape: MoEShape, width: int, description: str
) -> None:
    """Write the partitions of all layers as the contract of their topology."""
    neurons = [partition.neurons_EN.int() for partition in partitions]
    always_on_LS = torch.stack([partition.roles.always_on_S.int() for partition in partitions])
    if shape.pooled:
        home_E = torch.arange(len(neurons), dtype=torch.int32).repeat_interleave(torch.tensor([*map(len, neurons)]))
        PoolPartition(width, torch.cat(neurons), home_E, always_on_LS, description).save(folder)
    else:
        Partition(width, torch.stack(neurons), always_on_LS, description).save(folder)
