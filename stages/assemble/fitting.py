"""How a layer's router is fitted: over the layer's own experts, or over a pool that all layers share."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from models.config import MoEShape
from models.experts import ExpertLoop
from models.ffn import DenseFFN
from models.routing import LinearRouter
from stages.artifacts.partition import Partition, PoolPartition
from stages.assemble.config import AssembleConfig
from stages.calibration.batches import pick_tokens, take_tokens
from stages.calibration.slices import cut_pool, join_pool
from stages.routing.descent import DescentSettings
from stages.routing.fit import RouterSettings, fit_pool_router, fit_router
from stages.routing.task import RouterTask, watch_experts, watch_pool


class Fitted(NamedTuple):
    """One layer's router, what it was fitted on, and the dense FFN's outputs, a batch each."""

    task: RouterTask
    router: LinearRouter
    outputs: Sequence[Tensor]


# Layer, its FFN, the FFN's inputs, and a seed of its own → its router.
Fit = Callable[[int, DenseFFN, Sequence[Tensor], int], Fitted]


def over_own(
    partition: Partition, assemble: AssembleConfig, shape: MoEShape, device: torch.device, *, biased: bool
) -> Fit:
    """Each layer chooses among its own experts."""

    def fit(layer: int, ffn: DenseFFN, inputs: Sequence[Tensor], seed: int) -> Fitted:
        neurons_EN, always_S = partition.neurons[layer].to(device), partition.always_on[layer].to(device)
        task, outputs = watch_experts(ffn, neurons_EN, always_S, inputs, shape.top_k, biased=biased)
        return Fitted(task, fit_router(task, router_settings(assemble, seed, assemble.balance)), outputs)

    return fit


def over_pool(
    source: Path,
    partition: PoolPartition,
    assemble: AssembleConfig,
    shape: MoEShape,
    device: torch.device,
    *,
    biased: bool,
) -> Fit:
    """Each layer chooses among all experts, whichever layer they were cut from.

    No layer is to use all of them alike, so that nothing is paid for uneven load. What all experts would give is looked
    at on `router_tokens` tokens alone: it costs E·N / F times the dense FFN.
    """
    pool, neurons_EN = join_pool(cut_pool(source, partition, device)), partition.neurons.to(device)

    def fit(layer: int, ffn: DenseFFN, inputs: Sequence[Tensor], seed: int) -> Fitted:
        outputs = [ffn(x_TD) for x_TD in inputs]
        unrouted = LinearRouter.without_bias(ffn.gate_FD.new_zeros(shape.experts, ffn.gate_FD.shape[1]))
        always_S = partition.always_on[layer].to(device)
        loop = ExpertLoop(pool[layer], neurons_EN, always_S, unrouted, shape.top_k, ffn.width, ffn.act)
        picks = pick_tokens([len(x_TD) for x_TD in inputs], assemble.router_tokens)
        seen, wanted = take_tokens(inputs, picks), take_tokens(outputs, picks)
        task = watch_pool(loop, lambda batch, _: wanted[batch], seen, biased=biased)
        return Fitted(task, fit_pool_router(task, router_settings(assemble, seed, balance=0.0)), outputs)

    return fit


def router_settings(assemble: AssembleConfig, seed: int, balance: float) -> RouterSettings:
    """What decides the router of one layer."""
    descent = DescentSettings(assemble.router_steps, assemble.router_rate, balance, seed)
    return RouterSettings(assemble.router, assemble.ridge_penalty, descent, assemble.router_tokens)
