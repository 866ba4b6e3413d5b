"""From the sums of a scan to the stage's contract and its table."""

from collections.abc import Sequence

import torch

from models.ffn import GatedFFN
from models.quantization import dense_weight
from stages.contracts.job import Table
from stages.contracts.statistics import UnitStatistics
from stages.scan.reservoir import token_to_unit_major
from stages.stores.sums import ScanSums


def make_statistics(sums: ScanSums, mlps: Sequence[GatedFFN], *, gradients: bool) -> UnitStatistics:
    """Sums, weight norms and unit-major bitmaps."""
    tensors = dict(sums.tensors)
    bits_LRf = tensors.pop("bits_LRf")
    samples = int(sums.counters["samples"])
    norms = {
        f"weight_norm_{name}": torch.stack(
            [dense_weight(getattr(mlp, f"{name}_proj")).float().norm(dim=axis).cpu() for mlp in mlps]
        )
        for name, axis in (("gate", 1), ("up", 1), ("down", 0))
    }
    return UnitStatistics(
        tokens=int(sums.counters["tokens"]),
        samples=samples,
        samples_with_gradient=samples if gradients else 0,
        mean_loss=sums.counters["loss_sum"] / samples,
        active_bits=token_to_unit_major(bits_LRf, tensors["sum_abs"].shape[1]),
        reservoir_tokens=bits_LRf.shape[1],
        **tensors,
        **norms,
    )


def summarise(statistics: UnitStatistics, notes: Sequence[str]) -> Table:
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
    first = f"{tokens} tokens in {statistics.samples} samples, mean loss {statistics.mean_loss:.4f} nats"
    columns = ["layer", "mean |h|", "max |h|", "units never active", "mean gradient norm"]
    return Table("scan", columns, rows, [first, *notes])
