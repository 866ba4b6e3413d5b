"""evaluate: the carve, the dense model and the baselines on held-out text."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from models.config import ModelConfig
from models.ffn import DenseFFN
from models.loading import load_dense, load_tokenizer, resolve_device
from models.shape import Shape
from models.source import resolve_folder
from models.stream import LayerStream
from stages.calibration.alignment import AlignmentSettings
from stages.calibration.batches import calibration_batches
from stages.calibration.layer_seed import layer_seed
from stages.contracts.job import Job, Table
from stages.contracts.partition import Partition
from stages.contracts.routers import Routers
from stages.contracts.statistics import UnitStatistics
from stages.data.batches import batch_sequences
from stages.data.config import DataConfig
from stages.data.sequences import load_sequences
from stages.evaluate.baseline_pass import Text, run_baselines
from stages.evaluate.baselines import LayerFacts
from stages.evaluate.comparison import Comparison, compare
from stages.evaluate.config import EvaluateConfig
from stages.evaluate.native import load_carved
from stages.evaluate.report import Evaluation, summarise, write_report

FactsOf = Callable[[int, DenseFFN], LayerFacts]


def run(
    job: Job,
    *,
    model: ModelConfig,
    data: DataConfig,
    project: AlignmentSettings,
    evaluate: EvaluateConfig,
    shape: Shape,
    seed: int,
) -> Table:
    """Write `evaluation.json` and `evaluation.md`."""
    folder = resolve_folder(model)
    partition = Partition.load(job.parents["cluster"])
    carved_facts = read_facts(job, Routers.load(job.parents[evaluate.checkpoint]), partition, shape, seed)
    plain_facts = read_facts(job, Routers.load(job.parents["assemble"]), partition, shape, seed)
    text = load_text(data, load_tokenizer(folder), evaluate.batch_tokens)
    comparison = compare_models(job, model, text, carved_facts, evaluate, shape)
    with LayerStream(folder, device=resolve_device(model)) as stream:
        baselines = run_baselines(
            evaluate.baselines,
            stream,
            text,
            lambda index, layer: plain_facts(index, layer.ffn),
            project,
            replicated=int(partition.multiplicity.max()) > 1,
        )
    evaluation = Evaluation(
        shape,
        partition.width,
        comparison.losses["dense"].tokens,
        {**comparison.losses, **baselines},
        comparison.costs,
        comparison.layers,
    )
    write_report(evaluation, job.out)
    return summarise(evaluation)


def compare_models(
    job: Job, model: ModelConfig, text: Text, facts_of: FactsOf, evaluate: EvaluateConfig, shape: Shape
) -> Comparison:
    """Dense and carved model side by side; both are freed before the baselines run."""
    # The MoE is cut from the stored weights, whatever the scan computed with: it is held against the stored model.
    dense = load_dense(replace(model, quantization="none"), resolve_folder(model))
    carved = load_carved(job.parents[evaluate.checkpoint] / "checkpoint", model, dense.dtype, job.scratch / "offloaded")
    return compare(dense, carved, text.heldout, facts_of, shape, evaluate.speed_tokens)


def load_text(data: DataConfig, tokenizer: PreTrainedTokenizerBase, batch_tokens: int) -> Text:
    """Both splits."""
    heldout = batch_sequences(load_sequences(data, tokenizer, "heldout"), batch_tokens, tokenizer.pad_token_id or 0)
    return Text(calibration_batches(data, tokenizer, batch_tokens), heldout)


def read_facts(job: Job, routers: Routers, partition: Partition, shape: Shape, seed: int) -> FactsOf:
    """What earlier stages found and decided, layer by layer."""
    statistics = UnitStatistics.load(job.parents["scan"])
    contribution_LF: Tensor = statistics.sum_abs / statistics.tokens * statistics.weight_norm_down

    def facts_of(index: int, ffn: DenseFFN) -> LayerFacts:
        device = ffn.gate_FD.device
        return LayerFacts(
            ffn,
            partition.units[index].to(device).long(),
            partition.always_on[index].to(device).long(),
            routers.layer(index).to(device),
            contribution_LF[index].to(device),
            shape,
            # Away from the seeds of assembly, or the random router of the baseline would repeat that of a random carve.
            layer_seed(seed, 5_000 + index),
        )

    return facts_of
