"""Published ways to carve an FFN without training, in the shape of the carve: as many active neurons, experts of N."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import normalize

from models.ffn import DenseFFN
from models.routing import choose_experts
from stages.calibration.balanced import assign_balanced, fit_balanced_kmeans
from stages.calibration.share import Share
from stages.evaluate.baselines import Choice, LayerFacts
from stages.text.batches import TokenBatch

CMOE_ACTIVE = 10  # K_a: neurons that count as active for a token


def carve_cmoe(facts: LayerFacts, inputs: Sequence[Tensor]) -> tuple[LayerFacts, Choice]:
    """CMoE: tokens go to the experts whose typical neurons, as `select_cmoe` finds them, are most active."""
    carved, typical = select_cmoe(facts, inputs)
    return carved, lambda x_TD, _h: choose_experts(
        typical.hidden(x_TD).abs(), min(facts.shape.top_k, len(carved.neurons_EN))
    )


def select_cmoe(facts: LayerFacts, inputs: Sequence[Tensor]) -> tuple[LayerFacts, DenseFFN]:
    """CMoE: shared neurons and experts by coactivation, routers from each expert's most typical neuron.

    The S neurons that are most often active are shared. The next ones seed the experts; the others join them in one
    balanced assignment by the tokens on which they are active. Neurons that fill no expert, those least often active,
    are dropped. Returns the layer, and the typical neuron of each expert, the one closest to its mean, as its router.

    Source: arXiv:2502.04416, sections 3.1 and 3.2, as in its published code; differs: neither gate scales nor load
    balancing, which start at zero and are trained.
    """
    shape, gate_FD, up_FD = facts.shape, facts.ffn.gate_FD, facts.ffn.up_FD
    ffn = replace(facts.ffn, gate_FD=normalize(gate_FD, dim=1), up_FD=normalize(up_FD, dim=1))
    together_FF = count_coactive(ffn, inputs, min(CMOE_ACTIVE, facts.ffn.width)).cpu()
    order_F = together_FF.diagonal().argsort(descending=True, stable=True)
    always_S, others_U = order_F[: shape.always_on], order_F[shape.always_on :]
    size = min(shape.n, len(others_U))
    experts = len(others_U) // size
    others_U = others_U[: experts * size]
    together_UU = together_FF[others_U][:, others_U]
    active_U = together_UU.diagonal()
    # The L1 distance of two neurons' 0/1 rows over all tokens.
    distance_UE = active_U[:, None] + active_U[:experts] - 2 * together_UU[:, :experts]
    labels_U = assign_balanced(-distance_UE.float(), torch.full((experts,), size))
    neurons_EN = others_U[labels_U.argsort(stable=True)].view(experts, size)
    to_mean_EN = torch.stack(
        [
            together_FF.diagonal()[neurons_N] - 2 * together_FF[neurons_N][:, neurons_N].double().mean(1)
            for neurons_N in neurons_EN
        ]
    )
    typical_E = neurons_EN.gather(1, to_mean_EN.argmin(1, keepdim=True))[:, 0].to(ffn.gate_FD.device)
    typical = DenseFFN(ffn.gate_FD[typical_E], ffn.up_FD[typical_E], ffn.down_DF[:, typical_E], ffn.act)
    return _carved(facts, neurons_EN, always_S), typical


def carve_moefication(facts: LayerFacts, _inputs: Sequence[Tensor]) -> tuple[LayerFacts, Choice]:
    """MoEfication: experts by balanced k-means of the gate rows, tokens to the experts with the closest mean row.

    No neuron is always on: as many more experts are chosen. Neurons that fill no expert, those that contribute least,
    are dropped.

    Source: arXiv:2110.01786, sections 3.2 (parameter clustering) and 3.3 (parameter center); differs: the router of the
    paper's best figures, an MLP, would have to be trained.
    """
    shape, size = facts.shape, facts.shape.n
    experts = facts.ffn.width // size
    kept_U = facts.contribution_F.argsort(descending=True, stable=True)[: experts * size].cpu().sort().values
    rows_UD = normalize(facts.ffn.gate_FD[kept_U].cpu().float(), dim=1)
    labels_U = fit_balanced_kmeans(rows_UD, torch.full((experts,), size), rng=np.random.default_rng(facts.seed))
    order_U = labels_U.argsort(stable=True)
    centers_ED = rows_UD[order_U].view(experts, size, -1).mean(1).to(facts.ffn.gate_FD.device)
    half_squares_E = centers_ED.square().sum(1) / 2

    def choose(x_TD: Tensor, _h: Tensor) -> Tensor:
        closeness_TE = normalize(x_TD.float(), dim=1) @ centers_ED.T - half_squares_E
        return choose_experts(closeness_TE, min(shape.active_width // size, experts))

    return _carved(facts, kept_U[order_U].view(experts, size), kept_U[:0]), choose


# Name of the baseline → the layer with the method's own experts, and how tokens choose among them.
PUBLISHED: dict[str, Callable[[LayerFacts, Sequence[Tensor]], tuple[LayerFacts, Choice]]] = {
    "cmoe": carve_cmoe,
    "moefication": carve_moefication,
}


def first_text(batches: Sequence[TokenBatch], tokens: int) -> list[TokenBatch]:
    """The first batches of text, until they hold `tokens`."""
    text = [batch for batch in batches if batch.is_text]
    before = accumulate((batch.tokens for batch in text), initial=0)
    return [batch for batch, seen in zip(text, before, strict=False) if seen < tokens]


def _carved(facts: LayerFacts, neurons_EN: Tensor, always_S: Tensor) -> LayerFacts:
    """The same layer with other experts."""
    device = facts.ffn.gate_FD.device
    return replace(facts, neurons_EN=neurons_EN.to(device), always_S=always_S.to(device))


def count_coactive(ffn: DenseFFN, inputs: Sequence[Tensor], active: int) -> Int[Tensor, "F F"]:
    """On how many tokens of text both neurons are among the `active` largest |h|, for inputs of length 1; int32."""
    width = len(ffn.gate_FD)
    together_P = torch.zeros(width * width, dtype=torch.int32, device=ffn.gate_FD.device)
    text = Share.of(inputs).only_text()
    for x_TD in text:
        top_TA = ffn.hidden(normalize(x_TD, dim=1)).abs().topk(active, dim=1).indices
        pairs_TAA = top_TA[:, :, None] * width + top_TA[:, None]
        together_P.index_add_(0, pairs_TAA.flatten(), together_P.new_ones(pairs_TAA.numel()))
    text.workers.sum_(together_P)
    return together_P.view(width, width)
