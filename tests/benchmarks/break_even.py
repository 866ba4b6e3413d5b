"""Measures the sequence length from which the direct product is faster than the Gram product."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from benchmarks.rows import Row
from benchmarks.timing import Task, divide, take_turns
from benchmarks.workbench import Workbench
from torch import Tensor

from instruments import gradients as gradient_norms
from instruments.ffn_probe import FFNGradients, neuron_norms, neurons_prefer_gram

SHORTEST = 64
# Where the code's own break-even length is searched.
_ANY_LENGTH = range(1, 2**20)


@dataclass(frozen=True)
class Products:
    """Two products that give the same norms, and the code's choice between them."""

    name: str
    tasks: Callable[[int], dict[str, Task]]  # length → "gram" and "direct"
    prefers_gram: Callable[[int], bool]  # length → choice

    def code_length(self) -> int:
        """The first length for which the code chooses the direct product."""
        return _ANY_LENGTH[bisect_left(_ANY_LENGTH, True, key=lambda length: not self.prefers_gram(length))]


def measure_products(bench: Workbench, repetitions: int, longest: int) -> list[Row]:
    """Gram ÷ direct by length, the break-even length, and the cost of the code's own choice."""
    lengths = [SHORTEST * 2**step for step in range(1 + int(math.log2(longest / SHORTEST)))]
    rows: list[Row] = []
    for products in _all_products(bench):
        turns = (take_turns(products.tasks(length), repetitions, bench.device) for length in lengths)
        ratios = [divide(found["gram"], found["direct"]) for found in turns]
        named = zip(lengths, ratios, strict=True)
        rows += [Row(f"{products.name}: Gram ÷ direct product, length {length}", values) for length, values in named]
        rows += _summarise(products, lengths, ratios)
    return rows


def _summarise(products: Products, lengths: Sequence[int], ratios: Sequence[list[float]]) -> list[Row]:
    expected = products.code_length()
    crossings = [break_even(lengths, round_) for round_ in zip(*ratios, strict=True)]
    measured = break_even(lengths, [median(values) for values in ratios])
    outside = "" if lengths[0] < measured < lengths[-1] else "outside the lengths measured: a bound"
    cost = max(
        median(values) ** (1 if products.prefers_gram(length) else -1)
        for length, values in zip(lengths, ratios, strict=True)
    )
    return [
        Row(f"{products.name}: break-even length, measured", crossings, unit="tokens", note=outside),
        Row(f"{products.name}: break-even length in the code", [float(expected)], unit="tokens"),
        Row(f"{products.name}: measured ÷ code's", [length / expected for length in crossings], note=outside),
        Row(f"{products.name}: product chosen ÷ the faster one, worst length", [max(1.0, cost)]),
    ]


def break_even(lengths: Sequence[int], ratios: Sequence[float]) -> float:
    """The last length at which Gram ÷ direct rises above 1, interpolated in log-log; else the first or last length."""
    slower = [ratio > 1 for ratio in ratios]
    if all(slower):
        return float(lengths[0])
    last = max(number for number, is_slower in enumerate(slower) if not is_slower)
    if last == len(lengths) - 1:
        return float(lengths[-1])
    left, right = math.log(ratios[last]), math.log(ratios[last + 1])
    return lengths[last] * (lengths[last + 1] / lengths[last]) ** (-left / (right - left))


def _all_products(bench: Workbench) -> list[Products]:
    """Products for the scan's neurons and for the parameter-level scanner's up projection."""
    sizes = bench.model.config.hidden_size, bench.width
    return [
        Products(
            "neurons",
            partial(_neuron_tasks, bench, *sizes),
            lambda length: neurons_prefer_gram("auto", length, *sizes),
        ),
        Products(
            "weight of up",
            partial(_weight_tasks, bench, *sizes),
            lambda length: gradient_norms.prefer_gram("auto", length, *sizes),
        ),
    ]


def _neuron_tasks(bench: Workbench, hidden_size: int, width: int, length: int) -> dict[str, Task]:
    x, out, h, gate, up = _draw(bench, length, [hidden_size, hidden_size, width, width, width])
    record = FFNGradients(x, h, gate, up, h, out)
    without_graph = torch.no_grad()(neuron_norms)
    return {product: Task(partial(without_graph, record, product)) for product in ("gram", "direct")}


def _weight_tasks(bench: Workbench, hidden_size: int, width: int, length: int) -> dict[str, Task]:
    x, grad = _draw(bench, length, [hidden_size, width])
    without_graph = torch.no_grad()(gradient_norms.weight_squares)
    return {product: Task(partial(without_graph, x, grad, gram=product == "gram")) for product in ("gram", "direct")}


def _draw(bench: Workbench, length: int, sizes: Sequence[int]) -> list[Tensor]:
    """(B, T, size) each, with as many tokens as the batch has, or one sequence."""
    samples = max(1, bench.batch.input_ids.numel() // length)
    dtype = bench.model.get_input_embeddings().weight.dtype
    generator = torch.Generator(bench.device).manual_seed(0)
    kind = {"dtype": dtype, "device": bench.device, "generator": generator}
    return [torch.randn(samples, length, size, **kind) for size in sizes]
