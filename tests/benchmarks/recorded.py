"""The parts of the scan's work, one by one, on the tensors of one layer."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from benchmarks.timing import Task
from benchmarks.workbench import Workbench

from instruments.ffn_probe import FFNGradients, neuron_norms, neurons_prefer_gram, probe_gradients
from instruments.gradients import gram_matrix
from models.ffn import ffn_modules
from stages.accumulators.sums import empty_sums
from stages.scan.batch_sums import BatchSums, sum_shapes
from stages.scan.config import ScanConfig


def record_layer(bench: Workbench, layer: int) -> FFNGradients:
    """Copies of the tensors that the scan receives from one layer."""
    kept: list[FFNGradients] = []

    def keep(_layer: int, record: FFNGradients) -> None:
        kept.append(FFNGradients(**{name: tensor.detach().clone() for name, tensor in vars(record).items()}))

    with probe_gradients([ffn_modules(bench.model)[layer]], keep):
        bench.frozen_step()
    return kept[0]


def record_tasks(record: FFNGradients, layers: int, bench: Workbench) -> dict[str, Task]:
    """Tasks of one layer that differ by one part of the work; "to host" covers all layers."""
    rule = ScanConfig()
    # A threshold needs one comparison; the difference is the time to find the top share of a row.
    by_threshold, none_drawn = replace(rule, active_threshold=1.0), torch.full_like(bench.slots_BT, -1)

    def on_fresh_sums(work: Callable[[BatchSums], object], rule: ScanConfig, slots_BT: torch.Tensor) -> Task:
        fresh: list[BatchSums] = []
        mask_BT = bench.batch.attention_mask.bool()
        return Task(
            run=lambda: work(fresh[-1]),
            before=lambda: fresh.append(BatchSums(1, mask_BT, slots_BT, rule)),
            after=fresh.clear,
        )

    def add_hidden(sums: BatchSums) -> None:
        sums.add_hidden(0, record.h_BTF)

    tasks = {
        "all": on_fresh_sums(lambda sums: sums.add_gradients(0, record), rule, bench.slots_BT),
        "sums, active, bits": on_fresh_sums(add_hidden, rule, bench.slots_BT),
        "sums, active": on_fresh_sums(add_hidden, rule, none_drawn),
        "sums": on_fresh_sums(add_hidden, by_threshold, none_drawn),
        "norms": Task(partial(_norms, record, rule.norm_product)),
        "to host": _host_task(record, layers, bench, rule),
    }
    (_, length, hidden_size), width = record.x_BTD.shape, record.h_BTF.shape[-1]
    if neurons_prefer_gram(rule.norm_product, length, hidden_size, width):
        tasks["gram"] = Task(partial(_gram_matrices, record))
    return tasks


@torch.no_grad()
def _norms(record: FFNGradients, product: str) -> None:
    neuron_norms(record, product)


@torch.no_grad()
def _gram_matrices(record: FFNGradients) -> None:
    gram_matrix(record.x_BTD)
    gram_matrix(record.out_grad_BTD)


def _host_task(record: FFNGradients, layers: int, bench: Workbench, rule: ScanConfig) -> Task:
    sums = BatchSums(layers, bench.batch.attention_mask.bool(), bench.slots_BT, rule)
    with torch.no_grad():
        sums.add_gradients(0, record)
    sums.layers = [sums.layers[0]] * layers
    losses_B = torch.zeros(len(record.x_BTD), device=record.x_BTD.device)
    total = empty_sums(sum_shapes(layers, bench.width, int(bench.slots_BT.max()) + 1))
    return Task(lambda: sums.to_host(losses_B).add_to(total, number=0, counters={}))
