"""The monitor's cost per training step."""

from functools import partial
from statistics import median

import torch
from benchmarks.rows import Row
from benchmarks.timing import Task, compute_clock, divide, subtract, take_turns, task_within
from benchmarks.workbench import Workbench

from instruments.training_watch.model_watch import ModelWatch, watch_model


def measure_watch(bench: Workbench, repetitions: int) -> list[Row]:
    """Training step with the monitor ÷ without, and their difference."""
    tasks = {
        "plain": Task(lambda: _step(bench, None), bench.thaw, bench.freeze),
        "watched": task_within(partial(watch_model, bench.model), partial(_step, bench), bench.thaw, bench.freeze),
    }
    found = take_turns(tasks, repetitions, bench.device, compute_clock(bench.device))
    plain, watched = found["plain"], found["watched"]
    cost = [1000 * one for one in subtract(watched, plain)]
    return [
        Row("training step with the monitor ÷ without", divide(watched, plain), at_most=1.05),
        Row("the monitor", cost, unit="ms", note=f"of a step of {1000 * median(plain):.0f} ms"),
    ]


def _step(bench: Workbench, watch: ModelWatch | None) -> None:
    """A step without the optimizer, whose time would hide part of the cost."""
    loss = bench.forward_labels()
    torch.autograd.backward(loss)
    if watch is not None:
        watch.step(loss=loss)
