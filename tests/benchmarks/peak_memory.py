"""Peak memory of the scan above that of a frozen backward pass, relative to one layer's activations.

On a GPU: torch.cuda.max_memory_allocated. On a CPU: the largest resident set (VmHWM, Linux) of a new process, in which
every tensor above 64 KiB has its own memory mapping (MALLOC_MMAP_THRESHOLD_). Freed memory returns to the system at
once, so that the resident set is the live memory, including numpy's temporaries.
"""

import ctypes
import gc
import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from benchmarks.rows import Row
from benchmarks.scan_speed import scan_task
from benchmarks.timing import Task
from benchmarks.workbench import Workbench, make_workbench, read_options
from torch import Tensor

REPOSITORY = Path(__file__).parents[2]
# Variables by which glibc gives every block above 64 KiB a mapping of its own.
MAPPED = {"MALLOC_MMAP_THRESHOLD_": str(64 * 1024), "MALLOC_MMAP_MAX_": "1000000"}


def measure_memory(bench: Workbench, options: Namespace, words: Sequence[str]) -> list[Row]:
    """The row of this device and the figures behind it."""
    found = peaks(bench, options.repetitions) if bench.device.type == "cuda" else _peaks_of_new_process(words)
    layer = found["layer"][0]
    above = [(scan - frozen) / layer for scan, frozen in zip(found["scan"], found["frozen"], strict=True)]
    by = "torch.cuda.max_memory_allocated" if bench.device.type == "cuda" else "peak resident set, own process"
    sizes = {"scan's peak": "scan", "frozen pass's peak": "frozen", "one layer's activations": "layer"}
    return [
        Row("(scan's peak memory − frozen pass's) ÷ one layer's activations", above, at_most=1.0, note=by),
        *(Row(f"  {name}", [value / 2**20 for value in found[key]], unit="MiB") for name, key in sizes.items()),
    ]


def peaks(bench: Workbench, repetitions: int) -> dict[str, list[int]]:
    """Bytes above the memory before: peaks of the scan and the frozen pass, in turns, and one layer's activations."""
    tasks = {"scan": scan_task(bench, gradients=True), "frozen": Task(bench.frozen_step)}
    found: dict[str, list[int]] = {name: [] for name in tasks}
    peak = partial(_peak_of_gpu, bench.device) if bench.device.type == "cuda" else peak_of_process
    for number in range(repetitions + 1):
        for name, task in tasks.items():
            task.before()
            used = peak(task.run)
            task.after()
            if number:
                found[name].append(used)
    return found | {"layer": [layer_activations(bench)]}


def layer_activations(bench: Workbench) -> int:
    """Bytes that the middle decoder layer saves for a frozen backward pass, without weights."""
    layers = bench.model.get_decoder().layers
    layer = layers[len(layers) // 2]
    weights = {tensor.untyped_storage().data_ptr() for tensor in bench.model.state_dict().values()}
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    watching = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
    handles = [
        layer.register_forward_pre_hook(lambda *_: watching.__enter__()),
        layer.register_forward_hook(lambda *_: watching.__exit__()),
    ]
    try:
        bench.frozen_step()
    finally:
        for handle in handles:
            handle.remove()
    return sum(kept.values())


def _peak_of_gpu(device: torch.device, run: Callable[[], object]) -> int:
    gc.collect()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def peak_of_process(run: Callable[[], object]) -> int:
    """Bytes of the largest resident set during the run, above the resident set before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, "no Linux"
    return int(found[1]) * 1024


def _peaks_of_new_process(words: Sequence[str]) -> dict[str, list[int]]:
    environment = os.environ | MAPPED | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])}
    command = [sys.executable, "-m", "benchmarks.peak_memory", *words]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    wanted = read_options()
    sys.stdout.write(json.dumps(peaks(make_workbench(wanted), wanted.repetitions)))
