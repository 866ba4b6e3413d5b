"""The scan against a training step on the same batch, and the parts of its cost."""

from functools import partial

import torch
from benchmarks.rows import Row
from benchmarks.timing import Task, divide, subtract, take_turns
from benchmarks.workbench import Workbench

from instruments.ffn_probe import FFNGradients, neuron_norms, probe_gradients
from models.ffn import ffn_modules
from stages.accumulators.sums import ScanSums, empty_sums
from stages.losses import forward_losses
from stages.scan.batch_sums import sum_shapes
from stages.scan.config import ScanConfig
from stages.scan.passes import Scanner


def measure_scan(bench: Workbench, repetitions: int) -> list[Row]:
    """All gradient statistics ÷ a training step, and the parts of the scan's time."""
    layers = len(ffn_modules(bench.model))
    record = record_layer(bench, layers // 2)
    tasks = {
        "training": Task(bench.train_step, bench.thaw, bench.freeze),
        "scan": scan_task(bench, gradients=True),
        "frozen": Task(bench.frozen_step),
        "norms": Task(torch.no_grad()(partial(neuron_norms, record, "auto"))),
    }
    found = take_turns(tasks, repetitions, bench.device)
    norms = [layers * seconds for seconds in found["norms"]]
    rest = subtract(subtract(found["scan"], found["frozen"]), norms)
    whole = divide(found["scan"], found["training"])
    parts = {
        "frozen forward + backward": found["frozen"],
        "gradient norms": norms,
        "probes, sums, Taylor, transfer": rest,
    }
    return [
        Row("scan with all gradient statistics ÷ training step", whole, at_most=1.05),
        *(Row(f"  of it: {name}", divide(seconds, found["training"])) for name, seconds in parts.items()),
    ]


def record_layer(bench: Workbench, layer: int) -> FFNGradients:
    """Copies of the tensors that the scan receives from one layer."""
    kept: list[FFNGradients] = []

    def keep(_layer: int, record: FFNGradients) -> None:
        kept.append(FFNGradients(**{name: tensor.detach().clone() for name, tensor in vars(record).items()}))

    with probe_gradients([ffn_modules(bench.model)[layer]], keep):
        bench.frozen_step()
    return kept[0]


def measure_forward(bench: Workbench, repetitions: int) -> list[Row]:
    """Forward-only scan ÷ forward pass with loss."""
    tasks = {
        "forward": Task(torch.no_grad()(bench.forward_labels)),
        "own loss": Task(torch.no_grad()(partial(forward_losses, bench.model, bench.batch))),
        "forward-only scan": scan_task(bench, gradients=False),
    }
    found = take_turns(tasks, repetitions, bench.device)
    scan, own = (divide(found[name], found["forward"]) for name in ("forward-only scan", "own loss"))
    return [
        Row("forward-only scan ÷ forward pass with loss", scan, at_most=1.10),
        Row("  of it: forward pass with the loss by sample", own),
    ]


def scan_task(bench: Workbench, *, gradients: bool) -> Task:
    """Scan one batch into empty sums."""
    scan, mlps = ScanConfig(gradients=gradients), ffn_modules(bench.model)
    scanner = Scanner(bench.model, mlps, scan)
    shapes = sum_shapes(len(mlps), bench.width, int(bench.slots_BT.max()) + 1)
    fresh: list[ScanSums] = []
    return Task(
        run=lambda: scanner.scan(bench.batch, bench.slots_BT, fresh[-1], number=0),
        before=lambda: fresh.append(empty_sums(shapes)),
        after=fresh.clear,
    )
