"""scan: load the dense model, read it on the calibration text, write unit statistics."""

from tqdm import tqdm

from models.config import ModelConfig
from models.ffn import ffn_modules, ffn_weight_names
from models.loading import load_dense, load_tokenizer
from models.source import resolve_folder
from stages.contracts.job import Job, Table
from stages.data.batches import batch_sequences
from stages.data.config import DataConfig
from stages.data.sequences import load_sequences
from stages.scan.batch_sums import UnitRule, sum_shapes
from stages.scan.config import ScanConfig
from stages.scan.finish import make_statistics, summarise
from stages.scan.identity import sums_identity
from stages.scan.passes import Scanner
from stages.scan.recomputation import save_memory
from stages.scan.reservoir import draw_reservoir
from stages.scan.shares import agree_on_done, collect_sums, scan_shares, token_count
from stages.stores.config import StoreConfig
from stages.stores.open import StorePlace, open_store


def run(job: Job, *, model: ModelConfig, data: DataConfig, store: StoreConfig, scan: ScanConfig, seed: int) -> Table:
    """Read the dense model on text; goes on from the last flush of a killed run, alone or with other workers."""
    folder, workers = resolve_folder(model), job.workers
    tokenizer = load_tokenizer(folder)
    sequences = load_sequences(data, tokenizer, "calibration")
    batches = batch_sequences(sequences, scan.batch_tokens, tokenizer.pad_token_id or 0)
    total = token_count(batches, set(range(len(batches))))
    dense = load_dense(model, folder)
    save_memory(dense, asked=scan.gradient_checkpointing)
    mlps = ffn_modules(dense)
    shapes = sum_shapes(len(mlps), mlps[0].down_proj.in_features, min(scan.reservoir_tokens, total))
    place = StorePlace(job.scratch, model.label, sums_identity(job.fingerprint), ffn_weight_names(dense), workers)
    scanner = Scanner(dense, mlps, UnitRule(scan.active_share, scan.active_threshold, scan.norm_product), scan.gradients)
    slots_M = draw_reservoir(total, scan.reservoir_tokens, seed)
    with open_store(store, place, shapes) as keeper:
        resumed_at = token_count(batches, agree_on_done(keeper, workers))
        bar = tqdm(total=total, initial=resumed_at, desc="scan", unit="tok", smoothing=0.1, disable=not workers.leads)
        with bar as progress:
            scan_shares(
                scanner, batches, slots_M, keeper, shapes, workers,
                after_batch=progress.update, before_flush=lambda: None,
            )  # fmt: skip
        sums = collect_sums(keeper, workers)
    if sums is None:
        return Table("scan", [], [])
    statistics = make_statistics(sums, mlps, gradients=scan.gradients)
    statistics.save(job.out)
    return summarise(statistics, [f"went on from an earlier run at token {resumed_at}"] if resumed_at else [])
