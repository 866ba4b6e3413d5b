"""scan: load the dense model, read it on the calibration text, write unit statistics."""

from collections.abc import Sequence
from dataclasses import asdict

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from models.config import ModelConfig
from models.ffn import GatedFFN, ffn_modules
from models.loading import load_dense, load_tokenizer
from models.source import resolve_folder
from stages.contracts.job import Job, Table
from stages.contracts.statistics import UnitStatistics
from stages.data.batches import batch_sequences
from stages.data.config import DataConfig
from stages.data.sequences import load_sequences
from stages.scan.config import ScanConfig
from stages.scan.passes import Position, scan_batches
from stages.scan.reservoir import draw_reservoir, token_to_unit_major
from stages.scan.unit_sums import UnitSums
from stages.stores.config import StoreConfig
from stages.stores.local import LocalStore


def run(job: Job, *, model: ModelConfig, data: DataConfig, store: StoreConfig, scan: ScanConfig, seed: int) -> Table:
    """Read the dense model on text; goes on from the last checkpoint of a killed run."""
    folder = resolve_folder(model)
    tokenizer = load_tokenizer(folder)
    sequences = load_sequences(data, tokenizer, "calibration")
    batches = batch_sequences(sequences, scan.batch_tokens, tokenizer.pad_token_id or 0)
    total = sum(len(sequence.ids) for sequence in sequences)
    dense = load_dense(model, folder)
    mlps = ffn_modules(dense)
    if scan.gradient_checkpointing:
        enable_gradient_checkpointing(dense)
    keeper = LocalStore(job.scratch, every=store.checkpoint_every)
    sums, position = start_or_resume(keeper, mlps, scan, min(scan.reservoir_tokens, total))
    resumed_at = position.tokens
    with tqdm(total=total, initial=resumed_at, desc="scan", unit="tok", smoothing=0.1) as progress:

        def after_batch(position: Position, tokens: int) -> None:
            progress.update(tokens)
            keeper.save_if_due(sums.tensors, asdict(position))

        slots_T = draw_reservoir(total, scan.reservoir_tokens, seed)
        scan_batches(dense, mlps, batches, sums, position, slots_T, gradients=scan.gradients, after_batch=after_batch)
    statistics = finish(sums, position, mlps, gradients=scan.gradients)
    statistics.save(job.out)
    return summarise(statistics, resumed_at)


def enable_gradient_checkpointing(dense: PreTrainedModel, *, reentrant: bool = False) -> None:
    """Recompute layers in the backward pass, without switching dropout on as `train()` would."""
    # Renamed within transformers 5.
    enable = getattr(dense, "activation_checkpointing_enable", None) or dense.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    for layer in dense.get_decoder().layers:
        layer.training = True


def start_or_resume(
    keeper: LocalStore, mlps: Sequence[GatedFFN], scan: ScanConfig, reservoir: int
) -> tuple[UnitSums, Position]:
    """The sums and the position of a killed run, or empty ones."""
    sums = UnitSums.zeros(
        len(mlps),
        mlps[0].down_proj.in_features,
        reservoir,
        share=scan.active_share,
        threshold=scan.active_threshold,
        norm_product=scan.norm_product,
    )
    if (state := keeper.load()) is None:
        return sums, Position()
    sums.tensors, counters = state
    return sums, Position.resume(counters)


def finish(sums: UnitSums, position: Position, mlps: Sequence[GatedFFN], *, gradients: bool) -> UnitStatistics:
    """Sums, weight norms and unit-major bitmaps as the stage's contract."""
    tensors = dict(sums.tensors)
    bits_LRf = tensors.pop("bits_LRf")
    norms = {
        "weight_norm_gate": torch.stack([mlp.gate_proj.weight.float().norm(dim=1).cpu() for mlp in mlps]),
        "weight_norm_up": torch.stack([mlp.up_proj.weight.float().norm(dim=1).cpu() for mlp in mlps]),
        "weight_norm_down": torch.stack([mlp.down_proj.weight.float().norm(dim=0).cpu() for mlp in mlps]),
    }
    return UnitStatistics(
        tokens=position.tokens,
        samples=position.samples,
        samples_with_gradient=position.samples if gradients else 0,
        mean_loss=position.loss_sum / position.samples,
        active_bits=token_to_unit_major(bits_LRf, tensors["sum_abs"].shape[1]),
        reservoir_tokens=bits_LRf.shape[1],
        **tensors,
        **norms,
    )


def summarise(statistics: UnitStatistics, resumed_at: int) -> Table:
    """One row per layer."""
    tokens, samples = statistics.tokens, max(1, statistics.samples_with_gradient)
    gradient = (statistics.grad_norm_gate + statistics.grad_norm_up + statistics.grad_norm_down) / samples
    rows = [
        [
            layer,
            f"{statistics.sum_abs[layer].mean() / tokens:.3e}",
            f"{statistics.max_abs[layer].max():.3g}",
            int((statistics.active_count[layer] == 0).sum()),
            f"{gradient[layer].mean():.3e}",
        ]
        for layer in range(len(statistics.sum_abs))
    ]
    notes = [f"{tokens} tokens in {statistics.samples} samples, mean loss {statistics.mean_loss:.4f} nats"]
    if resumed_at:
        notes.append(f"went on from a killed run at token {resumed_at}")
    return Table("scan", ["layer", "mean |h|", "max |h|", "units never active", "mean gradient norm"], rows, notes)
