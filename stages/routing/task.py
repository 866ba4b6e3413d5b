"""The task of a layer's router (experts, inputs, target outputs), and measures of how well a router chooses."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from instruments.device import rounded_products
from models.experts import ExpertLoop, ExpertWeights, slice_experts
from models.ffn import DenseFFN
from models.routing import LinearRouter, chosen_mask
from stages.calibration.share import Share
from stages.calibration.token_memory import Keep, as_it_is
from stages.routing.descent import OutputError

MAX_ELEMENTS = 2**26  # of expert outputs in memory at a time: 256 MiB


def pieces(loop: ExpertLoop, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors (T, ·) by tokens, so that a piece's outputs of all experts have at most MAX_ELEMENTS."""
    chunk = max(1, MAX_ELEMENTS // (len(loop.neurons_EN) * tensors[0].shape[1]))
    return zip(*(torch.split(tensor, chunk) for tensor in tensors), strict=True)


def output_error(loop: ExpertLoop, x_TD: Float[Tensor, "T D"], target_TD: Float[Tensor, "T D"]) -> OutputError:
    """The objective of choosing experts for these tokens: the layer's output should match the target."""
    wanted_TD = target_TD - loop.always_on_output(x_TD)
    gains, overlaps = [], []
    for x_tD, wanted_tD in pieces(loop, x_TD, wanted_TD):
        output_tED = loop.expert_outputs(x_tD)
        gains.append((output_tED @ wanted_tD[:, :, None])[:, :, 0])
        overlaps.append(output_tED @ output_tED.mT)
    return OutputError(torch.cat(gains), torch.cat(overlaps), wanted_TD.square().sum(1))


def error_drops(loop: ExpertLoop, x_TD: Float[Tensor, "T D"], target_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T E"]:
    """Drop of a token's squared output error by each expert alone: (2·r·y_e − ‖y_e‖²) / ‖r‖², at least −1.

    r is the target minus the output of the always-on neurons. The drop is 1 if y_e = r, 0 if y_e = 0. The bound keeps a
    few large outputs from dominating a fit.
    """
    wanted_TD = target_TD - loop.always_on_output(x_TD)
    drops = []
    for x_tD, wanted_tD in pieces(loop, x_TD, wanted_TD):
        output_tED = loop.expert_outputs(x_tD)
        gains_tE = (output_tED @ wanted_tD[:, :, None])[:, :, 0]
        drops.append(2 * gains_tE - output_tED.square().sum(2))
    scale_T1 = wanted_TD.square().sum(1, keepdim=True).clamp_min(1e-30)
    return (torch.cat(drops) / scale_T1).clamp_min(-1)


def output_norms(loop: ExpertLoop, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T E"]:
    """‖y_e‖ of every expert for every token."""
    return torch.cat([loop.expert_outputs(x_tD).norm(dim=2) for (x_tD,) in pieces(loop, x_TD)])


@dataclass(frozen=True)
class RouterTask:
    """The data on which one layer's router is fitted, one tensor per batch."""

    loop: ExpertLoop  # the experts; its router is not used
    wanted: Sequence[Tensor]  # (T, D) target outputs of the whole layer
    inputs: Sequence[Tensor]  # (T, D) FFN inputs
    drops: Sequence[Tensor] = ()  # (T, E) `error_drops` of every expert; only in a pool

    @property
    def experts(self) -> int:
        """E."""
        return len(self.loop.neurons_EN)

    @property
    def top_k(self) -> int:
        """K."""
        return self.loop.top_k


def make_loop(
    ffn: DenseFFN,
    neurons_EN: Int[Tensor, "E N"],
    always_S: Int[Tensor, "S"],
    router: LinearRouter | None,
    top_k: int,
    experts: ExpertWeights | None = None,
) -> ExpertLoop:
    """These experts, None: plain slices of the layer, behind a router; None is a router of zeros."""
    if router is None:
        router = LinearRouter.without_bias(ffn.gate_FD.new_zeros(len(neurons_EN), ffn.gate_FD.shape[1]))
    experts = slice_experts(ffn.projections, neurons_EN, always_S) if experts is None else experts
    return ExpertLoop(experts, neurons_EN, always_S, router, top_k, ffn.width, ffn.act)


def watch_experts(
    ffn: DenseFFN,
    neurons_EN: Int[Tensor, "E N"],
    always_S: Int[Tensor, "S"],
    inputs: Sequence[Tensor],
    top_k: int,
    keep: Keep = as_it_is,
) -> RouterTask:
    """The task of a router over plain slices; `keep` stores the outputs."""
    with rounded_products(on=["cpu"]):
        wanted = [keep(ffn(x_TD)) for x_TD in inputs]
    return RouterTask(make_loop(ffn, neurons_EN, always_S, None, top_k), wanted, inputs)


def watch_pool(loop: ExpertLoop, wanted: Sequence[Tensor], inputs: Sequence[Tensor]) -> RouterTask:
    """The task of a layer's router over a pool; most of the pool's experts were cut from other layers."""
    drops = [error_drops(loop, x_TD, wanted_TD) for x_TD, wanted_TD in zip(inputs, wanted, strict=True)]
    return RouterTask(loop, wanted, inputs, drops)


def set_logit_std(router: LinearRouter, inputs: Sequence[Tensor], logit_std: float) -> LinearRouter:
    """Scale the router so that a token's logits have the standard deviation `logit_std` over experts, on average.

    Rows and bias are centred first: a shift common to all experts changes neither softmax nor choice.
    """
    centred_ED, share = router.rows_ED - router.rows_ED.mean(0), Share.of(inputs)
    squares = share.total((), lambda place: (inputs[place] @ centred_ED.T).double().square().mean(1).sum())
    deviation = (float(squares) / share.tokens) ** 0.5
    scale = logit_std / deviation if deviation > 0 else 1.0
    return LinearRouter(centred_ED * scale, (router.bias_E - router.bias_E.mean()) * scale)


def load_balance(
    router: LinearRouter, inputs: Sequence[Tensor], top_k: int, batches: Collection[int] | None = None
) -> Float[Tensor, "E"]:
    """Each expert's load on the numbered batches, or on all, relative to an even share (1 = even)."""

    def count(place: int) -> Tensor:
        return chosen_mask(router.choose(inputs[place], top_k), router.experts).sum(0)  # `bincount` waits for a GPU

    counts_E = Share.of(inputs).total((router.experts,), count, batches).float()
    return counts_E / counts_E.mean()
