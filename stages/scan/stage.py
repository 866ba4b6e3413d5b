"""scan: load the dense model, read it on the calibration text, write unit statistics."""

import json
from dataclasses import replace
from typing import Never

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from models.config import ModelConfig
from models.ffn import ffn_modules, ffn_weight_names
from models.loading import load_dense, load_tokenizer
from models.placement import input_device
from models.source import resolve_folder
from stages.calibration.recomputation import save_memory
from stages.contracts.job import Job, Table
from stages.contracts.workers import Workers
from stages.data.batches import batch_sequences
from stages.data.config import DataConfig
from stages.data.generated import continue_prompts
from stages.data.prompts import load_prompts
from stages.data.sequences import LoadedText, load_text
from stages.data.skipped import describe_skipped
from stages.data.sources import describe_source
from stages.scan.batch_sums import sum_shapes
from stages.scan.config import ScanConfig
from stages.scan.domains import find_domains, make_domain_statistics
from stages.scan.finish import make_statistics, summarise
from stages.scan.identity import sums_identity
from stages.scan.parameters import PartsPlace, publish_parameters, record_parameters, require_recorded
from stages.scan.passes import Scanner
from stages.scan.reservoir import draw_reservoir
from stages.scan.shares import agree_on_done, collect_sums, number_samples, scan_shares
from stages.scan.token_sums import UnitRule
from stages.stores.config import StoreConfig
from stages.stores.open import StorePlace, open_store


def run(job: Job, *, model: ModelConfig, data: DataConfig, store: StoreConfig, scan: ScanConfig, seed: int) -> Table:
    """Read the dense model on text; goes on from the last flush of a killed run, alone or with other workers."""
    folder, workers = resolve_folder(model), job.workers
    tokenizer = load_tokenizer(folder)
    text = read_text(data, tokenizer)
    dense = load_dense(replace(model, device=workers.pick_device(model.device)), folder)
    if data.labels == "generated":
        text = continue_prompts(
            dense, tokenizer, text, data, seed=seed, batch_tokens=scan.written_batch(),
            resume_file=job.scratch / "written.jsonl", workers=workers,
        )  # fmt: skip
    save_memory(dense, asked=scan.gradient_checkpointing)
    batches = batch_sequences(text.sequences, scan.read_batch(input_device(dense).type), tokenizer.pad_token_id or 0)
    mlps, domains = ffn_modules(dense), find_domains(batches, scan)
    shapes = sum_shapes(
        len(mlps), mlps[0].down_proj.in_features, min(scan.reservoir_tokens, text.tokens),
        domains=len(domains.names) if domains else 0,
    )  # fmt: skip
    identity = sums_identity(job.fingerprint, batches, dense.dtype)
    if domains:
        identity["domains"] = domains.digest(batches)
    place = StorePlace(job.scratch, model.label, identity, ffn_weight_names(dense), workers, job.fresh)
    parts = PartsPlace(job.scratch, identity)
    recording = record_parameters(
        dense, scan, parts, workers, source=describe_source(data, "calibration"), label=model.label, fresh=job.fresh
    )
    with open_store(store, place, shapes) as keeper, recording as parameters:
        rule = UnitRule(scan.active_share, scan.active_threshold, scan.norm_product)
        scanner = Scanner(dense, mlps, rule, scan.gradients, parameters, domains)
        slots_M = draw_reservoir(text.tokens, scan.reservoir_tokens, seed)
        done = agree_on_done(keeper, workers)
        resumed_at = sum(batches[number].tokens for number in done)
        if scan.parameters and workers.leads:
            require_recorded(parts, number_samples(batches, done))
        with show_progress(text.tokens, resumed_at, workers) as progress:
            scan_shares(scanner, batches, slots_M, keeper, workers, after_batch=progress.update)
        sums = collect_sums(keeper, workers)
    if sums is None:
        return Table("scan", [], [])
    if domains:
        make_domain_statistics(sums, domains, batches).save(job.out)
    statistics = make_statistics(sums, mlps, gradients=scan.gradients)
    statistics.save(job.out)
    if scan.parameters:
        publish_parameters(parts, job.out, statistics.samples, scan.parameter_encoding)
    if text.skipped:
        (job.out / "skipped.json").write_text(json.dumps(text.skipped, indent=1, sort_keys=True) + "\n")
    notes = [f"went on from an earlier run at token {resumed_at}"] if resumed_at else []
    return summarise(statistics, [*describe_skipped(text.skipped), *notes])


def read_text(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> LoadedText:
    """The calibration text, or the prompts that the model is to continue."""
    return load_prompts(data, tokenizer) if data.labels == "generated" else load_text(data, tokenizer, "calibration")


def show_progress(total: int, done: int, workers: Workers) -> "tqdm[Never]":
    """A bar over all tokens; with several workers it moves by the leading one's."""
    return tqdm(
        total=total,
        initial=done,
        desc="scan" if workers.world == 1 else f"scan, worker 1 of {workers.world}",
        unit="tok",
        smoothing=0.1,
        disable=not workers.leads,
    )
