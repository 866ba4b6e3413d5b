"""The tensor dump: its cost per training step, and its files against one `.pt` per tensor."""

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import torch
from benchmarks.rows import Row
from benchmarks.timing import Task, divide, take_turns
from benchmarks.workbench import Workbench
from torch import Tensor

from instruments.tensor_dump.config import DumpConfig
from instruments.tensor_dump.reader import DumpReader
from instruments.tensor_dump.tensor_dump import TensorDump

MEMORY_MIB = 512


def measure_dump(bench: Workbench, repetitions: int) -> list[Row]:
    """Slowdown of training, largest memory, throughput of writing and reading."""
    with tempfile.TemporaryDirectory() as folder:
        return [*_measure_steps(bench, repetitions, Path(folder)), *_measure_files(bench, repetitions, Path(folder))]


def _measure_steps(bench: Workbench, repetitions: int, folder: Path) -> list[Row]:
    numbers, peaks = count(), list[float]()
    plain = Task(bench.train_step, bench.thaw, bench.freeze)

    def dumping(config: DumpConfig, environment: dict[str, str]) -> Task:
        entered = ExitStack()
        dumps: list[TensorDump] = []

        def enter() -> None:
            bench.thaw()
            dump = TensorDump(bench.model, folder / f"step{next(numbers)}", config, environment=environment)
            dumps.append(entered.enter_context(dump))

        def step() -> None:
            bench.train_step()
            dumps[-1].step()

        def leave() -> None:
            if dumps[-1].enabled:
                peaks.append(dumps[-1]._memory.most_used / 2**20)
            entered.close()
            bench.freeze()
            shutil.rmtree(dumps.pop().folder, ignore_errors=True)

        return Task(step, enter, leave)

    every = DumpConfig(memory_mib=MEMORY_MIB)
    tasks = {
        "plain": plain,
        "disabled": dumping(every, {"TENSOR_SAVE_ENABLED": "0"}),
        "statistics only": dumping(DumpConfig(keep="statistics", memory_mib=1), {}),
        "every tensor": dumping(every, {}),
    }
    found = take_turns(tasks, repetitions, bench.device)
    bounds = {"disabled": 1.01, "statistics only": 1.05}
    rows = [
        Row(f"training step with the dump, {name} ÷ without", divide(found[name], found["plain"]), bounds.get(name))
        for name in tasks
        if name != "plain"
    ]
    return [*rows, Row("memory for tensors on their way, most used", [max(peaks)], MEMORY_MIB, unit="MiB")]


def _measure_files(bench: Workbench, repetitions: int, folder: Path) -> list[Row]:
    """The same tensors as a dump and as one `.pt` each, all synced to the disk."""
    tensors = _tensors_of(bench, folder / "tensors")
    size = sum(tensor.nbytes for tensor in tensors)
    model, numbers = _Consumer(len(tensors)), count()

    def dump() -> None:
        config = DumpConfig(tensors=["input"], memory_mib=MEMORY_MIB)
        with torch.no_grad(), TensorDump(model, folder / f"dump{next(numbers)}", config, environment={}):
            model(tensors)

    write = {"dump": Task(dump), "pt": Task(lambda: _write_pt(tensors, folder))}
    written = take_turns(write, repetitions, torch.device("cpu"))
    read: dict[str, Callable[[], object]] = {
        "dump": lambda: _read_dump(folder / "dump0"),
        "pt": lambda: [torch.load(path, weights_only=True) for path in sorted(folder.glob("*.pt"))],  # noqa: TID251
    }
    loaded = take_turns({name: Task(run) for name, run in read.items()}, repetitions, torch.device("cpu"))
    note = f"{len(tensors)} tensors, {size / 2**20:.0f} MiB, {size / 2**20 / min(written['dump']):.0f} MiB/s at best"
    return [
        Row("dump ÷ one .pt a tensor, written", divide(written["dump"], written["pt"]), note=note),
        Row("dump ÷ one .pt a tensor, read", divide(loaded["dump"], loaded["pt"])),
    ]


class _Consumer(torch.nn.Module):
    """Linear layers that receive given tensors and compute nothing."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(_Silent() for _ in range(layers))

    def forward(self, tensors: list[Tensor]) -> None:
        for layer, tensor in zip(self.layers, tensors, strict=True):
            layer(tensor)


class _Silent(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)

    def forward(self, input: Tensor) -> Tensor:
        return self.weight


def _tensors_of(bench: Workbench, folder: Path) -> list[Tensor]:
    """The tensors of one training step, including the logits' gradient."""
    bench.thaw()
    with TensorDump(bench.model, folder, DumpConfig(memory_mib=MEMORY_MIB), environment={}) as dump:
        bench.train_step()
        dump.step()
    bench.freeze()
    with DumpReader(folder) as reader:
        stored = {record.key: record for record in reader.records}
        return [reader.load(record) for record in stored.values()]


def _write_pt(tensors: list[Tensor], folder: Path) -> None:
    for number, tensor in enumerate(tensors):
        with (folder / f"{number}.pt").open("wb") as file:
            torch.save(tensor, file)
            file.flush()
            os.fsync(file.fileno())


def _read_dump(folder: Path) -> None:
    with DumpReader(folder) as reader:
        for record in reader.records:
            reader.load(record)
