"""cluster: read statistics and scores, write the partition and maps of chosen layers."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import repeat
from threading import Lock
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from instruments.device import free_device_memory, rounded_products
from models.config import ModelConfig, MoEShape
from models.device import in_order
from models.loading import release_freed_memory, resolve_device
from models.stream import LayerStream
from stages.artifacts.carve import NeuronStatistics, Scores
from stages.artifacts.job import NOTHING, Job, Table
from stages.artifacts.tensor_file import load_layer_checkpoint, save_layer_checkpoint
from stages.calibration.batches import CalibrationContext, deal_layers
from stages.calibration.config import VocabularyConfig
from stages.calibration.share import sample_rows
from stages.cluster.config import ClusterConfig, drops
from stages.cluster.layer import (
    GROUPING,
    Activity,
    LayerEvidence,
    LayerPartition,
    layer_shapes,
    partition_layer,
    save_partition,
    view_neurons,
)
from stages.text.config import DataConfig

Result = TypeVar("Result")


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
    """Group the neurons of every layer that does not stay dense: workers share the pass, then each groups one layer."""
    workers = job.workers
    statistics = NeuronStatistics.load(job.parents["scan"])
    layers, width = statistics.sum_abs.shape
    scores = Scores.load(job.parents["score"]) if cluster.reads_score(shape, width) else None
    drawn = layers_to_draw(cluster, layers, shape.dense_layers)
    shapes = layer_shapes(shape, scores.chosen) if scores and shape.pooled else [shape] * layers
    turns = -(-layers // workers.world)
    carved = [layer for layer in range(layers) if layer not in shape.dense_layers]
    done = workers.lead(lambda: {layer: load_layer_checkpoint(job.scratch, layer, LayerPartition) for layer in carved})
    device = resolve_device(replace(model, device=workers.pick_device(model.device)))
    activities: Iterable[Activity | None] = repeat(None, turns)
    if cluster.method == "router_aware" and None in done.values():
        context = CalibrationContext.of(model, data, vocabulary, seed, job)
        activities = open_activities(context, cluster.sample_tokens)

    def group(layer: int, activity: Activity | None) -> GroupedLayer | None:
        evidence = LayerEvidence(layer, statistics, scores, seed, device, activity)
        draw = layer in drawn
        return group_layer(cluster, evidence, shapes[layer], done[layer], draw=draw) if layer in done else None

    mine = range(workers.rank, turns * workers.world, workers.world)
    dealt = zip(mine, tqdm(activities, total=turns, desc="cluster", unit="layer"), strict=True)
    threads = min(workers.gather(count_threads(device, width, cluster.sample_tokens)))
    if threads > 1:
        # At the first use torch loads its library of linear algebra for GPUs, which fails if two threads are in it.
        torch.linalg.qr(torch.ones(1, 1, device=device))
    found: dict[int, GroupedLayer] = {}
    for result in run_ahead((partial(group, layer, activity) for layer, activity in dealt), threads):
        for grouped in filter(None, workers.gather(result)):
            if workers.leads:
                if done[grouped.layer] is None:
                    save_layer_checkpoint(job.scratch, grouped.layer, grouped.partition)
                for name, content in grouped.pictures.items():
                    (job.out / name).write_bytes(content)
            found[grouped.layer] = grouped
    release_freed_memory()
    if not workers.leads:
        return NOTHING
    description = describe(cluster, shape, width, scores.description if scores else None)
    save_partition(job.out, {layer: one.partition for layer, one in found.items()}, layers, shape, width, description)
    rows, pictures = [one.row for one in found.values()], [name for one in found.values() for name in one.pictures]
    return tabulate_layers(rows, description, pictures, shapes if shape.pooled else ())


def open_activities(context: CalibrationContext, tokens: int) -> Iterator[Activity | None]:
    """The FFN of each dealt layer, and at most `tokens` of its inputs, evenly spaced over the calibration text."""
    with LayerStream(context.folder, device=context.device) as stream:
        for dealt in deal_layers(stream, context.batches, context.workers, context.memory):
            yield (dealt.ffn, sample_rows(dealt.inputs, tokens)) if dealt else None


LAYERS_AT_ONCE = 8  # at most


def count_threads(device: torch.device, width: int, tokens: int) -> int:
    """How many layers are grouped at once: 1 on a CPU, whose cores share the work of a layer; else what memory allows.

    The host's part of a layer, the assignments, leaves a GPU idle.
    """
    if (free := free_device_memory(device)) is None:
        return 1
    layer = 4 * width * (5 * tokens + 3 * width)  # energies of all tokens and their intermediates; weights, for D ≤ F
    return max(1, min(LAYERS_AT_ONCE, os.cpu_count() or 1, free // 2 // layer))


def run_ahead(calls: Iterable[Callable[[], Result]], threads: int) -> Iterator[Result]:
    """Results of the calls in their order; up to `threads` calls run at once, while the next one is prepared."""
    if threads == 1:
        yield from (call() for call in calls)
        return
    within_operators = torch.get_num_threads()
    torch.set_num_threads(1)  # else each call would use all cores for its operators
    try:
        # torch has one format of products for all threads: moments of one layer would round choices in another.
        with rounded_products(use=False, on=["cuda"]):
            yield from in_order(calls, threads, ahead=threads)
    finally:
        torch.set_num_threads(within_operators)


class GroupedLayer(NamedTuple):
    """The result for one layer."""

    layer: int
    partition: LayerPartition
    row: list[object]  # of the table
    pictures: dict[str, bytes]  # name → PNG file


DRAWING = Lock()  # neither matplotlib nor numba's parallel code, which UMAP runs, may be used by two threads at once


def layers_to_draw(cluster: ClusterConfig, layers: int, dense: Sequence[int] = ()) -> list[int]:
    """Layers to draw, ascending, without the `dense` ones."""
    if cluster.map == "none":
        return []
    carved = [layer for layer in range(layers) if layer not in dense]
    wanted = cluster.map_layers or [carved[len(carved) // 2]]
    return sorted({layer % layers for layer in wanted}.difference(dense))


def group_layer(
    cluster: ClusterConfig, evidence: LayerEvidence, shape: MoEShape, partition: LayerPartition | None, *, draw: bool
) -> GroupedLayer:
    """Group the neurons of one layer, or take the `partition` of an earlier run; `draw` a map."""
    features = lru_cache(maxsize=1)(partial(view_neurons, evidence))
    if partition is None:
        partition = partition_layer(
            torch.zeros(evidence.statistics.sum_abs.shape[1]) if evidence.scores is None else evidence.score_F,
            features,
            shape,
            method=cluster.method,  # type: ignore[arg-type] # checked against the field's choices
            rng=evidence.draw(GROUPING),
            activity=evidence.activity,
        )
    pictures = {}
    if draw and shape.experts:
        with DRAWING:
            from stages.cluster.picture import plot_layer  # noqa: PLC0415 - its libraries take seconds to import

            pictures = plot_layer(partition, features(), evidence, cluster)
    shares = (share_of(evidence.contribution_F, chosen) for chosen in (partition.always_on_S, partition.dropped_X))
    always_on, dropped = (f"{share:.1%}" for share in shares)
    copies = int(partition.neurons_EN.flatten().bincount(minlength=1).max())
    row = [evidence.layer, always_on, len(partition.dropped_X), dropped, copies]
    return GroupedLayer(evidence.layer, partition, row, pictures)


def share_of(contribution_F: Float[Tensor, "F"], neurons: Int[Tensor, "U"]) -> float:
    """These neurons' share of the layer's contribution; 0 if the layer contributes nothing."""
    total = float(contribution_F.sum())
    return float(contribution_F[neurons].sum()) / total if total else 0.0


def tabulate_layers(
    rows: Sequence[list[object]], description: str, pictures: Sequence[str], shapes: Sequence[MoEShape] = ()
) -> Table:
    """The rows of the carved layers, and notes on the method; `shapes` are the layers' shapes in a pool."""
    notes = [description, "shares are of the layer's mean |h|·‖d‖"]
    if shapes:
        given = ", ".join(str(shape.experts) for shape in shapes)
        notes.append(f"experts that the layers give to the pool, by score: {given}")
    if pictures:
        notes.append(f"maps: {', '.join(pictures)}")
    columns = ["layer", "always-on share", "dropped neurons", "dropped share", "most copies"]
    return Table("cluster", columns, rows, notes)


def describe(cluster: ClusterConfig, shape: MoEShape, width: int, score: str | None) -> str:
    """One sentence on the method, and which neurons the score chose.

    `score` describes the score; None if it had no effect.
    """
    chosen = {
        "always-on": shape.always_on > 0,
        "dropped": drops(shape, width) and not shape.pooled,
        "dealt-out": cluster.method == "rank" and not shape.pooled,
        "pooled": shape.pooled,
    }
    roles = " and ".join(role for role, taken in chosen.items() if taken)
    said = f"{roles} neurons by {score}" if score else "no neuron is always on or dropped"
    return f"experts by {cluster.method}; {said}"
