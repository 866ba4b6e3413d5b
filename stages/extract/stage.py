"""extract: slice every layer's experts from the shards, one layer in memory at a time."""

from time import perf_counter

from tqdm import tqdm

from models.checkpoint.shards import DenseReader
from models.config import ModelConfig
from models.experts import slice_experts
from models.source import resolve_folder
from stages.artifacts.carve import Partition
from stages.artifacts.experts import ExtractedLayer
from stages.artifacts.job import Job, Table
from stages.artifacts.tensor_file import layer_file, save_layer_checkpoint


def run(job: Job, *, model: ModelConfig) -> Table:
    """Copy the neurons of the partition into one file per layer that does not stay dense."""
    folder = resolve_folder(model)
    partition = Partition.load(job.parents["cluster"])
    started, size = perf_counter(), 0
    with DenseReader(folder) as reader:
        for layer in tqdm(partition.carved_layers, desc="extract", unit="layer"):
            neurons_EN, always_on_S = partition.neurons_of(layer), partition.always_on[layer]
            experts = slice_experts(reader.projections(layer), neurons_EN, always_on_S)
            save_layer_checkpoint(job.out, layer, ExtractedLayer(experts, neurons_EN, always_on_S))
            size += layer_file(job.out, layer).stat().st_size
    return summarise(partition, size, perf_counter() - started)


def summarise(partition: Partition, size: int, seconds: float) -> Table:
    """The closing table."""
    _layers, experts, n, always_on, width = partition.sizes
    layers = len(partition.carved_layers)
    rows = [
        ("layers", layers),
        ("experts in all" if partition.pooled else "experts a layer", experts),
        ("neurons an expert", n),
        ("always-on neurons a layer", always_on),
        ("neurons dropped a layer", f"{partition.dropped / layers:.0f} of {width}"),
        ("most copies of a neuron", int(partition.multiplicity.max())),
        ("written", f"{size / 2**20:.1f} MiB"),
        ("time", f"{seconds:.1f} s, {size / 2**20 / max(seconds, 1e-9):.0f} MiB/s"),
    ]
    return Table("Experts extracted", ("what", "value"), rows)
