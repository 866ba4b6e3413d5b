"""How cluster, assemble and project scale: one layer of Qwen2.5-7B's shape, with random weights.

    PYTHONPATH=.:tests python -m benchmarks.wide_layer --parts 4 2 1 --tokens 2048 4096

Processor seconds, so that other programs do not count, and peak memory above weights and inputs.
"""

import math
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from benchmarks.peak_memory import peak_of_process
from tabulate import tabulate
from torch import Tensor

from models.config import MoEShape
from models.ffn import DenseFFN
from models.routing import GateKind
from stages.assemble.stage import fit_layer
from stages.calibration.alignment import column_scale, gate_moments
from stages.calibration.batches import DealtLayer
from stages.calibration.normal_equations import NormalEquations
from stages.calibration.share import sample_rows
from stages.calibration.token_memory import as_it_is
from stages.cluster.layer import partition_layer
from stages.cluster.methods import FEATURE_DIMS, project_on_top_directions, unpack_bits
from stages.project.config import ProjectConfig
from stages.project.layer_pass import project_layer
from stages.routing.descent import RouterSettings
from stages.routing.task import load_balance, set_logit_std

HIDDEN, WIDTH = 3584, 18944  # D, F
TOKENS, TOPICS = 8192, 256  # of the activation bits
BATCHES = 16  # calibration text has at least this many
PENALTY = 1.0  # one of the penalties that stage=project tries


def draw_layer(width: int, tokens: int) -> tuple[DenseFFN, list[Tensor]]:
    """An FFN, and inputs with the norm of a layer norm's output."""
    generator = torch.Generator().manual_seed(0)
    gate_FD, up_FD, down_FD = torch.randn(3, width, HIDDEN, generator=generator) / math.sqrt(HIDDEN)
    inputs = torch.randn(tokens, HIDDEN, generator=generator).chunk(BATCHES)
    return DenseFFN(gate_FD, up_FD, down_FD.T.contiguous(), torch.nn.functional.silu), list(inputs)


def draw_bits(width: int) -> Tensor:
    """Packed activation bits: 80 % are set on tokens of the neuron's topic, 10 % on others."""
    rng = np.random.default_rng(0)
    topic_F, topic_R = rng.integers(TOPICS, size=width), rng.integers(TOPICS, size=TOKENS)
    bits_Fr = np.empty((width, TOKENS // 8), dtype=np.uint8)
    for neuron in range(width):
        chance_R = np.where(topic_R == topic_F[neuron], 0.8, 0.1)
        bits_Fr[neuron] = np.packbits(rng.random(TOKENS, dtype=np.float32) < chance_R)
    return torch.from_numpy(bits_Fr)


def shape_of(width: int) -> MoEShape:
    """The default shape: experts of 64, a quarter of the FFN always on, half of it active."""
    experts = 3 * width // 4 // 64
    return MoEShape(experts=experts, n=64, top_k=width // 4 // 64, always_on=width - 64 * experts)


def measure(name: str, width: int, tokens: int, work: Callable[[], object]) -> list[object]:
    """Run `work`; returns a row of the table."""
    start = time.process_time()
    peak = peak_of_process(work)
    return [name, width, tokens, f"{time.process_time() - start:.1f}", f"{peak / 2**30:.2f}"]


@torch.no_grad()
def measure_layer(width: int, tokens: int) -> Iterator[list[object]]:
    """Rows of the stages in turn; each stage uses the previous one's result."""
    (ffn, inputs), shape, found = draw_layer(width, tokens), shape_of(width), SimpleNamespace()
    bits_Fr = draw_bits(width)
    scores_F = torch.rand(width, generator=torch.Generator().manual_seed(1))
    router = RouterSettings("error", 0.1, 8192, 0, 0.01, 0.0, 0)

    def cluster() -> None:
        rng = np.random.default_rng(0)

        def features() -> Tensor:
            return project_on_top_directions(unpack_bits(bits_Fr, TOKENS), FEATURE_DIMS, rng)

        found.partition = partition_layer(
            scores_F,
            scores_F,
            features,
            shape,
            method="router_aware",
            rng=rng,
            sample=lambda: (ffn, sample_rows(inputs, TOKENS)),
        )

    def assemble() -> None:
        neurons_EN, always_S = found.partition.neurons_EN, found.partition.always_on_S
        task, fitted = fit_layer(DealtLayer(0, ffn, inputs, as_it_is), None, neurons_EN, always_S, shape.top_k, router)
        routed = task.routed(set_logit_std(fitted, inputs, 1.0))
        found.loop = replace(routed, gate=GateKind.SIGMOID_OF_CHOSEN)
        column_scale(found.loop, inputs)
        gate_moments(found.loop, inputs)
        load_balance(found.loop.router, inputs, shape.top_k)

    def project() -> None:
        wanted = [ffn(x_TD) for x_TD in inputs]
        refit = RouterSettings("error", 0.1, 8192, 200, 0.01, 0.0, 0)
        settings = ProjectConfig(penalties=[PENALTY], validate=False, descent_steps=0)  # descent is linear in F
        project_layer(found.loop, refit, inputs, wanted, settings, seed=0)

    def solve() -> None:
        moments = NormalEquations(width, HIDDEN)
        for panel_PA in moments.panels:
            panel_PA.diagonal().fill_(1.0)
        moments.solve(PENALTY)

    for stage in (cluster, assemble, project):
        yield measure(stage.__name__, width, tokens, stage)
    yield measure("one solve of it", width, tokens, solve)


def main() -> None:
    """Print the table."""
    parser = ArgumentParser("wide_layer")
    parser.add_argument("--parts", type=int, nargs="+", default=[4, 2, 1], help="F is divided by these")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096])
    options = parser.parse_args()
    headers = ["stage", "F", "tokens", "processor seconds", "peak GiB"]
    for part in options.parts:
        for tokens in options.tokens:
            rows = list(measure_layer(WIDTH // part, tokens))
            print(tabulate(rows, headers, tablefmt="github"), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
