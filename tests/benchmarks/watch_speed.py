"""The monitor's cost per training step."""

from contextlib import ExitStack

import torch
from benchmarks.rows import Row
from benchmarks.timing import Task, divide, take_turns
from benchmarks.workbench import Workbench

from instruments.training_watch.model_watch import ModelWatch, watch_model
from instruments.training_watch.step_log import WatchConfig


def measure_watch(bench: Workbench, repetitions: int) -> list[Row]:
    """Training step with the monitor ÷ without: gradients alone, and with the outputs of all modules."""
    tasks = {
        "plain": _plain(bench),
        "gradients alone": _watched(bench, activations=False),
        "gradients and outputs": _watched(bench, activations=True),
    }
    found = take_turns(tasks, repetitions, bench.device)
    return [
        Row(f"training step with the monitor, {name} ÷ without", divide(found[name], found["plain"]), at_most=1.05)
        for name in tasks
        if name != "plain"
    ]


def _plain(bench: Workbench) -> Task:
    return Task(lambda: _step(bench, None), bench.thaw, bench.freeze)


def _watched(bench: Workbench, *, activations: bool) -> Task:
    entered = ExitStack()
    watches: list[ModelWatch] = []

    def enter() -> None:
        bench.thaw()
        watches.append(entered.enter_context(watch_model(bench.model, config=WatchConfig(activations=activations))))

    def leave() -> None:
        entered.close()
        watches.clear()
        bench.freeze()

    return Task(lambda: _step(bench, watches[-1]), enter, leave)


def _step(bench: Workbench, watch: ModelWatch | None) -> None:
    """A step without the optimizer, whose time would hide part of the cost."""
    loss = bench.forward_labels()
    torch.autograd.backward(loss)
    if watch is not None:
        watch.step(loss=loss)
