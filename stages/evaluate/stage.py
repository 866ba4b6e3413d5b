"""evaluate: the carve, the dense model and the baselines on held-out text."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from instruments.dtypes import dtype_name
from models.config import ModelConfig, MoEShape
from models.emit import checkpoint_dtype
from models.ffn import DenseFFN
from models.finding import find_decoder
from models.loading import (
    experts_argument,
    load_carved,
    load_dense,
    load_tokenizer,
    padding_id,
    release_freed_memory,
    resolve_dtype,
)
from models.routing import LinearRouter
from models.stream import LayerStream
from stages.artifacts.carve import NeuronStatistics, Partition, Routers
from stages.artifacts.job import NOTHING, Job, Table
from stages.calibration.alignment import AlignmentSettings
from stages.calibration.batches import CalibrationContext, count_positions, layer_seed
from stages.calibration.config import VocabularyConfig
from stages.evaluate.baselines import FIRST_SEED, FactsOf, LayerFacts
from stages.evaluate.comparison import Text, count_parameters, follow_ffns, measure_speed, run_baselines, watch_states
from stages.evaluate.config import EvaluateConfig
from stages.evaluate.report import Evaluation, LayerResult, ModelCost, summarise, write_report
from stages.evaluate.samples import Sample, write_samples
from stages.losses import MeanLoss, measure_loss
from stages.text.batches import batch_sequences
from stages.text.config import DataConfig
from stages.text.sequences import load_text


def run(
    job: Job,
    *,
    model: ModelConfig,
    data: DataConfig,
    vocabulary: VocabularyConfig,
    project: AlignmentSettings,
    evaluate: EvaluateConfig,
    shape: MoEShape,
    seed: int,
) -> Table:
    """Write `evaluation.json`."""
    context = CalibrationContext.of(model, data, vocabulary, seed, job, evaluate.batch_tokens)
    partition = Partition.load(job.parents["cluster"])
    tokenizer = load_tokenizer(context.folder, trust_remote_code=model.trust_remote_code)
    sequences, pad_id = load_text(data, tokenizer, "heldout").sequences, padding_id(tokenizer)
    text = Text(context.batches, batch_sequences(sequences, context.batch_tokens, pad_id))

    def write(models: Mapping[str, PreTrainedModel]) -> list[Sample]:
        return write_samples(models, tokenizer, data, evaluate.samples)

    carved_facts = read_facts(job, evaluate.checkpoint, context, partition, shape)
    losses, costs, layers, samples, states = compare_models(job, context, text, carved_facts, evaluate, shape, write)
    release_freed_memory()  # `find_routers` makes cycles of the blocks, which would keep the MoE on the GPU
    dtype = resolve_dtype(context.model, context.device) or checkpoint_dtype(context.folder, "source")
    baselines: dict[str, MeanLoss] = {}
    if not shape.pooled:
        plain_facts = read_facts(job, "assemble", context, partition, shape)
        with LayerStream(context.folder, device=context.device) as stream:
            replicated, memory = int(partition.multiplicity.max()) > 1, context.memory
            baselines = run_baselines(
                evaluate.baselines, stream, text, plain_facts, project, replicated, job.workers, memory, states
            )
    elif "unaligned" in evaluate.baselines:
        offloaded = job.scratch / f"assembled-{job.workers.rank}"
        assembled = load_carved(job.parents["assemble"] / "checkpoint", context.model, dtype, offloaded)
        baselines["unaligned"] = measure_loss(assembled, text.heldout, "unaligned", job.workers)
    if not job.workers.leads:
        return NOTHING
    tokens, trained = losses["dense"].tokens, evaluate.checkpoint == "train"
    width, lacking, compared = partition.width, find_decoder(context.folder).lacking, losses | baselines
    evaluation = Evaluation(shape, width, lacking, tokens, compared, costs, layers, trained, samples, dtype_name(dtype))
    write_report(evaluation, job.out)
    return summarise(evaluation)


def compare_models(
    job: Job,
    context: CalibrationContext,
    text: Text,
    facts_of: FactsOf,
    evaluate: EvaluateConfig,
    shape: MoEShape,
    write: Callable[[Mapping[str, PreTrainedModel]], list[Sample]],
) -> tuple[dict[str, MeanLoss], dict[str, ModelCost], list[LayerResult], list[Sample], list[Tensor]]:
    """Losses and costs of both models by name, the results of every carved FFN, and what both models write.

    Also the dense model's states after the last layer, for the baselines: both models are freed before these run.
    """
    # The MoE is cut from the stored weights, so the dense model is not quantised, even if the scanned one was.
    dense = load_dense(replace(context.model, quantization="none"), context.folder)
    checkpoint = job.parents[evaluate.checkpoint] / "checkpoint"
    carved = load_carved(checkpoint, context.model, dense.dtype, job.scratch / f"offloaded-{job.workers.rank}")
    models = {"dense": dense, "carved": carved}
    workers = job.workers
    positions = count_positions(text.heldout[workers.rank :: workers.world])
    with watch_states(dense, positions, context.memory) as states:
        losses, layers = follow_ffns(dense, carved, text.heldout, facts_of, shape, workers)
    # One worker measures while the others wait, since they would take memory bandwidth.
    timed = evaluate.speed_tokens
    # transformers' default: so users get the speed, and a GPU decodes with batched_mm.
    carved.set_experts_implementation(experts_argument(carved.config, "grouped_mm"))
    speed = workers.lead(lambda: measure_speed(models, text.heldout, timed)) if timed else {}
    costs = {name: ModelCost(*count_parameters(one, shape), speed.get(name)) for name, one in models.items()}
    return losses, costs, layers, workers.lead(lambda: write(models)), states


def read_facts(job: Job, stage: str, context: CalibrationContext, partition: Partition, shape: MoEShape) -> FactsOf:
    """Results of earlier stages by layer; routers are those of `stage`."""
    statistics, routers = NeuronStatistics.load(job.parents["scan"]), Routers.load(job.parents[stage])
    contribution_LF = statistics.contribution

    @cache  # a layer is compared batch by batch
    def fetch(index: int, device: torch.device) -> tuple[Tensor, Tensor, LinearRouter, Tensor]:
        chosen = partition.routed(index), partition.always_on[index]
        neurons_EN, always_S = (neurons.to(device).long() for neurons in chosen)
        return neurons_EN, always_S, routers.layer(index).to(device), contribution_LF[index].to(device)

    def facts_of(index: int, ffn: DenseFFN) -> LayerFacts:
        facts, seed = fetch(index, ffn.gate_FD.device), layer_seed(context.seed, FIRST_SEED + index)
        return LayerFacts(ffn, *facts, shape, seed, stays_dense=index in shape.dense_layers)

    return facts_of
