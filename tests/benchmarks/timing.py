"""Seconds of several tasks that take turns, so that other load on the machine affects all of them."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TypeVar

import torch
from tqdm import tqdm


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Task:
    """A task: `run` is timed, `before` and `after` are not."""

    run: Callable[[], object]
    before: Callable[[], object] = _nothing
    after: Callable[[], object] = _nothing


T = TypeVar("T")


def task_within(
    make: Callable[[], AbstractContextManager[T]],
    run: Callable[[T], object],
    before: Callable[[], object] = _nothing,
    after: Callable[[], object] = _nothing,
) -> Task:
    """Time `run` within a context; entering and leaving it is not timed."""
    stack, entered = ExitStack(), list[T]()

    def enter() -> None:
        before()
        entered.append(stack.enter_context(make()))

    def leave() -> None:
        stack.close()
        entered.clear()
        after()

    return Task(lambda: run(entered[-1]), enter, leave)


def compute_clock(device: torch.device) -> Callable[[], float]:
    """The clock for tasks that only compute: of one thread, the CPU's time, which other programs hardly change."""
    return time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def take_turns(
    tasks: Mapping[str, Task], repetitions: int, device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of every task, in the order A B C A B C ...; the first round is a warm-up and does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for number in tqdm(range(repetitions + 1), desc=", ".join(tasks)[:60], leave=False, disable=None):
        gc.collect()
        for name, task in tasks.items():
            found = _time(task, device, clock)
            if number:
                seconds[name].append(found)
    return seconds


def _time(task: Task, device: torch.device, clock: Callable[[], float]) -> float:
    task.before()
    try:
        _wait(device)
        start = clock()
        task.run()
        _wait(device)
        return clock() - start
    finally:
        task.after()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def divide(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Ratios by round."""
    return [above / below for above, below in zip(numerators, denominators, strict=True)]


def subtract(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Differences by round."""
    return [left - right for left, right in zip(first, second, strict=True)]
