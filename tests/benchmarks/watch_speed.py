"""The monitor's cost per training step."""

from functools import partial
from statistics import median

import torch
from benchmarks.rows import Row
from benchmarks.timing import Task, compute_clock, divide, subtract, take_turns, task_within
from benchmarks.workbench import Workbench

from instruments.training_watch.model_watch import ModelWatch, watch_model
from instruments.training_watch.step_log import WatchConfig


def measure_watch(bench: Workbench, repetitions: int) -> list[Row]:
    """Training step with the monitor ÷ without and their difference: gradients alone, and with all modules' outputs."""
    tasks = {"plain": Task(lambda: _step(bench, None), bench.thaw, bench.freeze)}
    for name, activations in (("gradients alone", False), ("gradients and outputs", True)):
        watch = partial(watch_model, bench.model, config=WatchConfig(activations=activations))
        tasks[name] = task_within(watch, partial(_step, bench), bench.thaw, bench.freeze)
    found = take_turns(tasks, repetitions, bench.device, compute_clock(bench.device))
    plain, rows = found.pop("plain"), []
    for name, seconds in found.items():
        cost = [1000 * one for one in subtract(seconds, plain)]
        step = f"of a step of {1000 * median(plain):.0f} ms"
        rows.append(Row(f"training step with the monitor, {name} ÷ without", divide(seconds, plain), at_most=1.05))
        rows.append(Row(f"the monitor, {name}", cost, unit="ms", note=step))
    return rows


def _step(bench: Workbench, watch: ModelWatch | None) -> None:
    """A step without the optimizer, whose time would hide part of the cost."""
    loss = bench.forward_labels()
    torch.autograd.backward(loss)
    if watch is not None:
        watch.step(loss=loss)
