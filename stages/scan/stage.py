"""scan: load the dense model, run it on the calibration text, write neuron statistics."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch
import transformers
from torch.nn.functional import pad
from tqdm import tqdm
from transformers import PreTrainedModel

from instruments.device import allow_rounded_products
from instruments.dtypes import dtype_name
from instruments.ffn_probe import GatedFFN
from instruments.files import hash_code
from models.config import ModelConfig
from models.ffn import dense_weight, ffn_modules, ffn_weight_names
from models.loading import input_device, load_dense, load_tokenizer, padding_id
from models.source import resolve_folder
from stages.accumulators.config import StoreConfig
from stages.accumulators.sums import LocalStore, ScanSums, Shapes, SumStore
from stages.artifacts.carve import NeuronStatistics
from stages.artifacts.job import NOTHING, Job, Table
from stages.losses import save_memory
from stages.scan import passes
from stages.scan.batch_sums import sum_shapes
from stages.scan.config import ScanConfig
from stages.scan.parameters import PartsPlace, publish_parameters, record_parameters
from stages.text.batches import TokenBatch, batch_sequences
from stages.text.config import DataConfig, list_sources
from stages.text.generated import generate_text
from stages.text.sequences import LoadedText, describe_skipped, load_text


def make_statistics(sums: ScanSums, mlps: Sequence[GatedFFN], *, gradients: bool) -> NeuronStatistics:
    """Statistics from the sums, the weight norms and neuron-major bitmaps."""
    tensors = dict(sums.tensors)
    bits_LRf = tensors.pop("bits_LRf")
    samples, width = int(sums.counters["samples"]), tensors["sum_abs"].shape[1]
    norms = (dense_weight(mlp.down_proj).float().norm(dim=0).cpu() for mlp in mlps)
    return NeuronStatistics(
        tokens=int(sums.counters["tokens"]),
        samples=samples,
        samples_with_gradient=samples if gradients else 0,
        mean_loss=sums.counters["loss_sum"] / samples,
        active_bits=passes.token_to_neuron_major(bits_LRf, width),
        reservoir_tokens=bits_LRf.shape[1],
        weight_norm_down=torch.stack([pad(norm_F, (0, width - len(norm_F))) for norm_F in norms]),
        **tensors,
    )


def summarise(statistics: NeuronStatistics, notes: Sequence[str]) -> Table:
    """One row per layer."""
    tokens, samples = statistics.tokens, max(1, statistics.samples_with_gradient)
    gradient = (statistics.grad_norm_gate + statistics.grad_norm_up + statistics.grad_norm_down) / samples
    rows = []
    for layer, own_F in enumerate(statistics.own):
        sum_F, count_F, gradient_F = (
            of[layer][own_F] for of in (statistics.sum_abs, statistics.active_count, gradient)
        )
        largest, silent = float(statistics.max_abs[layer].max()), int((count_F == 0).sum())
        rows.append([layer, f"{sum_F.mean() / tokens:.3e}", f"{largest:.3g}", silent, f"{gradient_F.mean():.3e}"])
    first = f"{tokens} tokens in {statistics.samples} samples, mean loss {statistics.mean_loss:.4f} nats"
    columns = ["layer", "mean |h|", "max |h|", "neurons never active", "mean gradient norm"]
    return Table("scan", columns, rows, [first, *notes])


REPOSITORY = Path(__file__).resolve().parents[2]
# Source files that affect the sums of a batch.
SOURCES = (
    "stages/scan",
    "stages/losses.py",
    "instruments/ffn_probe.py",
    "instruments/gradients.py",
    "instruments/parameter_scan",
    "models/ffn.py",
    "models/loading.py",
    "models/quantization.py",
)


def sums_cache_key(fingerprint: str, batches: Iterable[TokenBatch], dtype: torch.dtype) -> dict[str, str]:
    """Settings (`fingerprint`), inputs and code of a scan.

    Text and dtype are in it because the settings do not determine them: a model may generate other text on other
    hardware, and config.json may name no dtype.
    """
    text = hashlib.sha256()
    for batch in batches:
        text.update(repr([part.tolist() for part in (batch.input_ids, batch.labels, batch.attention_mask)]).encode())
    return {
        "scan": fingerprint,
        "text": text.hexdigest()[:16],
        "dtype": dtype_name(dtype),
        "code": hash_code(REPOSITORY, SOURCES)[:16],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def load_inputs(
    job: Job, model: ModelConfig, data: DataConfig, scan: ScanConfig, seed: int
) -> tuple[PreTrainedModel, LoadedText, list[TokenBatch]]:
    """The dense model, and the text and its batches; the model generates the text unless a killed run has done so."""
    folder, workers = resolve_folder(model), job.workers
    tokenizer = load_tokenizer(folder, trust_remote_code=model.trust_remote_code)

    @cache
    def load() -> PreTrainedModel:
        dense = load_dense(replace(model, device=workers.pick_device(model.device)), folder)
        passes.check_causal(dense)
        return dense

    def size(dense: PreTrainedModel) -> int:
        return scan.batch_size(input_device(dense).type)

    if data.labels == "generated":
        text = generate_text(load, tokenizer, data, job.scratch, seed=seed, at_once=size, workers=workers)
    else:
        text = load_text(data, tokenizer, "calibration")
    dense = load()
    save_memory(dense, asked=scan.gradient_checkpointing)
    batches = batch_sequences(text.sequences, size(dense), padding_id(tokenizer))
    return dense, text, batches


@contextmanager
def open_store(
    store: StoreConfig,
    shapes: Shapes,
    job: Job,
    *,
    label: str,
    identity: Mapping[str, str],
    weights: Sequence[Mapping[str, str]],
) -> Iterator[SumStore]:
    """Open this worker's store of a scan, and close it at the end.

    Only sums of equal `identity` are added up; its entry `scan` is the fingerprint. `weights` maps gate, up and down of
    every layer to the name of the weight. Raises UserError: the store cannot be reached, or holds sums of another scan.
    """
    workers, every = job.workers, store.checkpoint_every
    keeper: SumStore | None = None
    if store.kind == "local":
        rank, world = workers.rank, workers.world
        place = {"worker": rank, "workers": world}
        keeper = LocalStore(job.scratch, shapes, identity=identity, every=every, fresh=job.fresh, **place)
    else:
        from stages.accumulators.redis_store import open_redis_store  # noqa: PLC0415 - an optional extra

        claim = partial(open_redis_store, store, shapes, label=label, identity=identity, weights=weights)
        # The leading worker claims the namespace before the others open it.
        keeper = claim(fresh=job.fresh) if workers.leads else None
        workers.broadcast(None)
        keeper = keeper or claim()
    with closing(keeper):
        yield keeper


def run(job: Job, *, model: ModelConfig, data: DataConfig, store: StoreConfig, scan: ScanConfig, seed: int) -> Table:
    """Run the dense model on text and write its statistics. Resumes from the last flush of a killed run."""
    workers = job.workers
    allow_rounded_products(allowed=model.rounded_products)
    dense, text, batches = load_inputs(job, model, data, scan, seed)
    mlps = ffn_modules(dense)
    shapes = sum_shapes(
        len(mlps), max(mlp.down_proj.in_features for mlp in mlps), min(scan.reservoir_tokens, text.tokens)
    )
    identity = sums_cache_key(job.fingerprint, batches, dense.dtype)
    parts = PartsPlace(job.scratch, identity)
    source = ", ".join(source.title for source in list_sources(data, "calibration"))
    recording = record_parameters(dense, scan, parts, workers, source=source, label=model.label, fresh=job.fresh)
    weights = ffn_weight_names(dense)
    storing = open_store(store, shapes, job, label=model.label, identity=identity, weights=weights)
    with storing as keeper, recording as parameters:
        scanner = passes.Scanner(dense, mlps, scan, parameters)
        slots_M = passes.draw_reservoir(text.tokens, scan.reservoir_tokens, seed)
        done = passes.agree_on_done(keeper, workers)
        resumed_at = sum(batches[number].tokens for number in done)
        whose = "scan" if workers.world == 1 else f"scan, worker 1 of {workers.world}"
        with tqdm(
            total=text.tokens, initial=resumed_at, desc=whose, unit="tok", smoothing=0.1, disable=not workers.leads
        ) as progress:
            passes.scan_shares(scanner, batches, slots_M, keeper, workers, after_batch=progress.update)
        sums = passes.collect_sums(keeper, workers)
    if sums is None:
        return NOTHING
    statistics = make_statistics(sums, mlps, gradients=scan.gradients)
    passes.check_mean_loss(statistics.mean_loss, dense)
    statistics.save(job.out)
    if scan.parameters:
        publish_parameters(parts, job.out, statistics.samples)
    if text.skipped:
        (job.out / "skipped.json").write_text(json.dumps(text.skipped, indent=1, sort_keys=True) + "\n")
    notes = [f"went on from an earlier run at token {resumed_at}"] if resumed_at else []
    return summarise(statistics, [*describe_skipped(text.skipped), *notes])
