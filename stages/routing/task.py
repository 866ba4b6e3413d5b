"""What a router of one layer is fitted on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxtyping import Int
from torch import Tensor

from models.expert_loop import ExpertLoop
from models.ffn import DenseFFN
from models.routing import LinearRouter, choose_experts, membership
from stages.calibration.alignment import Target
from stages.calibration.contributions import expert_contributions
from stages.calibration.slices import slice_ffn
from stages.routing.expert_outputs import error_drops


@dataclass(frozen=True)
class RouterTask:
    """A layer's experts, and what they are to give, batch by batch."""

    loop: ExpertLoop  # experts as they are; its router is not looked at
    target: Target  # the whole layer's wanted output
    biased: bool  # the MoE's architecture has a selection bias, so the router may have an intercept
    inputs: Sequence[Tensor]  # (T, D) FFN inputs
    contributions: Sequence[Tensor]  # (T, E) Σ_{i∈e} |h_i|·‖d_i‖ of every expert; in a pool what it takes off the error

    @property
    def experts(self) -> int:
        """E."""
        return len(self.loop.units_EN)

    @property
    def top_k(self) -> int:
        """K."""
        return self.loop.top_k

    def best_experts(self, batch: int) -> Int[Tensor, "T K"]:
        """The experts of largest contribution."""
        return choose_experts(self.contributions[batch], self.top_k)

    def routed(self, router: LinearRouter) -> ExpertLoop:
        """The layer with a router."""
        return replace(self.loop, router=router)


def make_loop(
    ffn: DenseFFN, units_EN: Int[Tensor, "E N"], always_S: Int[Tensor, "S"], router: LinearRouter | None, top_k: int
) -> ExpertLoop:
    """The plain slices of a layer behind a router; without one, behind zero rows."""
    if router is None:
        router = LinearRouter.without_bias(ffn.gate_FD.new_zeros(len(units_EN), ffn.gate_FD.shape[1]))
    return ExpertLoop(slice_ffn(ffn, units_EN, always_S), units_EN, always_S, router, top_k, ffn.width, ffn.act)


def watch_contributions(ffn: DenseFFN, units_EN: Int[Tensor, "E N"], inputs: Sequence[Tensor]) -> list[Tensor]:
    """(T, E) Σ_{i∈e} |h_i|·‖d_i‖ of every batch."""
    member_EF = membership(units_EN, ffn.width)
    return [expert_contributions(ffn, ffn.hidden(x_TD), member_EF) for x_TD in inputs]


def watch_experts(
    ffn: DenseFFN,
    units_EN: Int[Tensor, "E N"],
    always_S: Int[Tensor, "S"],
    inputs: Sequence[Tensor],
    top_k: int,
    *,
    biased: bool,
) -> tuple[RouterTask, list[Tensor]]:
    """The task of a router for plain slices, and the FFN's outputs (T, D), from one look at the activations."""
    member_EF = membership(units_EN, ffn.width)
    contributions, outputs = [], []
    for x_TD in inputs:
        h_TF = ffn.hidden(x_TD)
        contributions.append(expert_contributions(ffn, h_TF, member_EF))
        outputs.append(ffn.output(h_TF))
    loop = make_loop(ffn, units_EN, always_S, None, top_k)
    return RouterTask(loop, lambda batch, _: outputs[batch], biased, inputs, contributions), outputs


def watch_pool(loop: ExpertLoop, target: Target, inputs: Sequence[Tensor], *, biased: bool) -> RouterTask:
    """The task of a layer's router over a pool of which most experts were cut from other layers.

    How large a foreign expert's output is says nothing of its use, so that contributions are the drops of the error.
    """
    drops = [error_drops(loop, x_TD, target(index, x_TD)) for index, x_TD in enumerate(inputs)]
    return RouterTask(loop, target, biased, inputs, drops)
