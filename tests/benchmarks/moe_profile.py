"""Where the MoE's time goes, by kind of operator."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import torch
from benchmarks.rows import Row
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

# An operator has the first kind with a word that its name, or the name of a caller, contains.
KINDS = {
    "experts' matrix products": ("grouped_mm", "bmm"),
    "attention": ("scaled_dot_product", "flash", "attention"),
    "other matrix products": ("mm", "linear", "matmul"),
    "choosing experts, moving tokens": (
        "topk",
        "sort",
        "index",
        "gather",
        "scatter",
        "histc",
        "bincount",
        "cumsum",
        "softmax",
        "sigmoid",
    ),
    "copies": ("copy", "cat", "clone", "_to_copy", "fill", "zero"),
    "products by element, sums, norms": ("mul", "add", "silu", "sum", "mean", "pow", "rsqrt", "div", "neg"),
}


class Phases(Protocol):
    """The phases to profile."""

    def prefill(self) -> None:
        """Many tokens at once."""

    def decode(self) -> None:
        """One token at a time, after a prefill."""


def profile_shares(name: str, runner: Phases, device: torch.device) -> list[Row]:
    """Rows with each kind's share of the operators' time, for prefill and decode.

    Args:
        name: the model's name in the rows.
        runner: warmed up.
        device: the device whose time counts.
    """
    rows = []
    for phase in ("prefill", "decode"):
        shares = measure_shares(runner, phase, device)
        rows += [Row(f"  {phase}, MoE {name}: {kind}", [share]) for kind, share in shares.items()]
    return rows


def measure_shares(runner: Phases, phase: str, device: torch.device) -> dict[str, float]:
    """Kind → share of the summed self time."""
    if phase == "decode":
        runner.prefill()
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities, acc_events=True) as found:
        getattr(runner, phase)()
        if cuda:
            torch.cuda.synchronize(device)
    spent: dict[str, float] = defaultdict(float)
    for event in found.events():
        if event.device_type == DeviceType.CPU:  # includes the time of the kernels that it started
            spent[kind_of(callers(event))] += event.self_device_time_total if cuda else event.self_cpu_time_total
    total = sum(spent.values())
    return {kind: spent[kind] / total for kind in (*KINDS, "the rest")}


def callers(event: FunctionEvent) -> list[str]:
    """Names of an operator and its callers: a grouped product may run as several plain ones."""
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    return names


def kind_of(operators: Sequence[str]) -> str:
    """The kind of an operator, from its name and its callers' names."""
    return next(
        (kind for kind, words in KINDS.items() if any(word in name for word in words for name in operators)),
        "the rest",
    )
