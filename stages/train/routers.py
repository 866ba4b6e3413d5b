"""Routers in training: load balancing, and growth of the logits."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn

from models.training import Routing, selection_bias


@dataclass(frozen=True)
class Balance:
    """Method of load balancing."""

    kind: str  # loss, selection_bias or none
    bias_step: float  # change of a selection bias per step, in the bias's unit, at logits of standard deviation 1
    pooled: bool = False  # an expert's load is that of all layers together


def count_load(routings: list[Routing], mask_T: Tensor) -> Int[Tensor, "L E"]:
    """Number of tokens that chose each expert, without padding."""
    loads = [routing.chosen_TK[mask_T].flatten().bincount(minlength=routing.logits_TE.shape[1]) for routing in routings]
    return torch.stack(loads)


def balance_loss(
    routings: list[Routing], load_LE: Int[Tensor, "L E"], mask_T: Tensor, *, pooled: bool = False
) -> Float[Tensor, ""]:
    """Mean over layers of E · Σ_e (share of choices for e) · (mean probability of e); 1 for even load.

    `load_LE` is of this process or summed over all; `pooled`: all layers share the experts, and loads are averaged.
    Source: Switch Transformers, arXiv:2101.03961 eq. 4, per choice.
    """
    probability_LE = torch.stack([routing.logits_TE[mask_T].float().softmax(1).mean(0) for routing in routings])
    share_LE = load_LE / load_LE.sum(1, keepdim=True).clamp_min(1)
    if pooled:
        probability_LE, share_LE = probability_LE.mean(0, keepdim=True), share_LE.mean(0, keepdim=True)
    return probability_LE.shape[1] * (share_LE * probability_LE).sum(1).mean()


def z_loss(routings: list[Routing], mask_T: Tensor) -> Float[Tensor, ""]:
    """Mean over layers and tokens of (log Σ exp logits)².

    Source: ST-MoE, arXiv:2202.08906 eq. 5.
    """
    return torch.stack([routing.logits_TE[mask_T].float().logsumexp(1).square().mean() for routing in routings]).mean()


def entropy(routings: list[Routing], mask_T: Tensor) -> Float[Tensor, ""]:
    """Mean entropy of the softmax over experts, in nats; log E where all logits are equal."""
    parts = []
    for routing in routings:
        log_TE = routing.logits_TE[mask_T].detach().float().log_softmax(1)
        parts.append(-(log_TE.exp() * log_TE).sum(1).mean())
    return torch.stack(parts).mean()


def add_up(tensor: Tensor) -> Tensor:
    """The sum of `tensor` over all processes, as a new tensor if there are several."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return tensor
    total = tensor.clone()
    dist.all_reduce(total)
    return total


@torch.no_grad()
def move_biases(routers: list[nn.Module], load_LE: Int[Tensor, "L E"], step: float, *, pooled: bool = False) -> None:
    """Raise the selection bias of experts below the mean load by `step`, lower that of experts above; mean change 0.

    `load_LE` counts the tokens of all processes since the last call; `pooled`: the load is that of all layers together.
    `step` is in the unit of the router's scores.
    Source: auxiliary-loss-free load balancing, arXiv:2408.15664 eq. 2; differs: the changes are centred.
    """
    load_LE = load_LE.double()
    if pooled:
        load_LE = load_LE.mean(0, keepdim=True).expand(len(routers), -1)
    for router, load_E in zip(routers, load_LE, strict=True):
        bias_E = selection_bias(router)
        assert bias_E is not None, "only routers with a selection bias are balanced by it"
        direction_E = (load_E.mean() - load_E).sign().to(bias_E)
        bias_E.add_(direction_E - direction_E.mean(), alpha=step)


@dataclass(frozen=True)
class LogitSchedule:
    """Scheduled standard deviation of a token's router logits; ignores changes by training."""

    start: float
    end: float
    steps: int  # number of optimizer steps from start to end

    def at(self, step: int) -> float:
        """The standard deviation after `step` steps."""
        return self.start + (self.end - self.start) * min(1.0, step / self.steps)

    def factor(self, step: int) -> float:
        """Factor on the routers after step `step`."""
        return self.at(step) / self.at(step - 1)


def make_schedule(start: float, end: float, steps: int) -> LogitSchedule:
    """A schedule that never shrinks: if `end` is below `start`, it stays at `start`."""
    return LogitSchedule(start, max(start, end), max(1, steps))


@torch.no_grad()
def stretch(routers: list[nn.Module], factor: float) -> None:
    """Multiply all router rows and selection biases by `factor`, in place."""
    if factor == 1.0:
        return
    for router in routers:
        weight: torch.Tensor = router.weight  # type: ignore[assignment]
        weight.mul_(factor)
        bias_E = selection_bias(router)
        if bias_E is not None:
            bias_E.mul_(factor)
