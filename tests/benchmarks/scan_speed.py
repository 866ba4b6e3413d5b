"""The scan against a training step on the same batch, and the time of its parts."""

from functools import partial

import torch
from benchmarks.recorded import record_layer, record_tasks
from benchmarks.rows import Row
from benchmarks.timing import Task, divide, subtract, take_turns
from benchmarks.workbench import Workbench

from instruments.ffn_probe import FFNGradients, probe_gradients
from models.ffn import ffn_modules
from stages.accumulators.sums import ScanSums, empty_sums
from stages.losses import forward_losses
from stages.scan.batch_sums import sum_shapes
from stages.scan.config import ScanConfig
from stages.scan.passes import Scanner


def measure_scan(bench: Workbench, repetitions: int) -> list[Row]:
    """All gradient statistics ÷ a training step, and the parts of their cost above a frozen pass."""
    layers = len(ffn_modules(bench.model))
    tasks = {
        "training": Task(bench.train_step, bench.thaw, bench.freeze),
        "scan": scan_task(bench, gradients=True),
        "frozen": Task(bench.frozen_step),
        "probed": Task(partial(_probed_step, bench)),
        **record_tasks(record_layer(bench, layers // 2), layers, bench),
    }
    found = take_turns(tasks, repetitions, bench.device)
    training = found["training"]
    rows = [
        Row("scan with all gradient statistics ÷ training step", divide(found["scan"], training), at_most=1.05),
        Row("  of it: frozen forward + backward", divide(found["frozen"], training)),
    ]
    extra = subtract(found["scan"], found["frozen"])
    parts = _parts(found, layers)
    parts["not explained by these"] = subtract(extra, [sum(values) for values in zip(*parts.values(), strict=True)])
    return [*rows, *(Row(f"  of it: {name}", divide(values, training)) for name, values in parts.items())]


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


def _probed_step(bench: Workbench) -> None:
    """A frozen pass with the scan's probes; their records are ignored."""
    with probe_gradients(ffn_modules(bench.model), _ignore):
        bench.frozen_step()


def _ignore(_layer: int, _record: FFNGradients) -> None:
    pass


def _parts(found: dict[str, list[float]], layers: int) -> dict[str, list[float]]:
    """Seconds of all layers, from one layer; each part is the difference of tasks that differ by it."""

    def of_layers(first: str, *others: str) -> list[float]:
        seconds = found[first]
        for other in others:
            seconds = subtract(seconds, found[other])
        return [layers * value for value in seconds]

    parts = {
        "probes, h computed again": subtract(found["probed"], found["frozen"]),
        "sums of |h| and h², largest |h|": of_layers("sums"),
        "which neurons are active": of_layers("sums, active", "sums"),
        "bits of active neurons": of_layers("sums, active, bits", "sums, active"),
        "Taylor": of_layers("all", "sums, active, bits", "norms"),
    }
    if "gram" in found:
        parts["norms: Gram matrices"] = of_layers("gram")
        parts["norms: quadratic forms"] = of_layers("norms", "gram")
    else:
        parts["norms: direct products"] = of_layers("norms")
    return parts | {"to the host, into the sums": found["to host"]}
