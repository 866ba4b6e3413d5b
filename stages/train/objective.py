"""Phases and their rates, the training loss of one forward pass, load balancing, the routers' logits, and figures."""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.routing import count_choices
from models.training import Part, RouterWatch, Routing, selection_bias
from stages.losses import prediction_distance, predicts, supervised_tokens, token_losses
from stages.train.config import TrainConfig


@dataclass(frozen=True)
class Phase:
    """Consecutive optimizer steps in which the same parts learn."""

    name: str
    first: int  # number of steps of earlier phases
    steps: int
    learns: frozenset[Part]

    @property
    def last(self) -> int:
        """Number of steps at its end, earlier phases included."""
        return self.first + self.steps


_LEARNS = {
    "router": frozenset({Part.ROUTER}),
    "experts": frozenset({Part.ROUTER, Part.EXPERTS}),
    "all": frozenset(Part),
}


def make_phases(settings: TrainConfig, step_tokens: float) -> list[Phase]:
    """The phases with a share above 0, each of at least one step of `step_tokens` tokens."""
    phases: list[Phase] = []
    for name, learns in _LEARNS.items():
        share = getattr(settings, f"{name}_share")
        if share > 0:
            first = phases[-1].last if phases else 0
            phases.append(Phase(name, first, max(1, round(share * settings.tokens / step_tokens)), learns))
    return phases


def rate_factor(step: int, phase: Phase, settings: TrainConfig) -> float:
    """Share of the peak rate at a phase's step (from 0): a linear rise, 1, then half a cosine down to `final_rate`."""
    warmup = math.ceil(settings.warmup_share * phase.steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    start = max(warmup, math.floor((1 - settings.decay_share) * phase.steps))
    progress = min(1.0, max(0, step - start) / max(1, phase.steps - 1 - start))
    return settings.final_rate + (1 - settings.final_rate) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class Balance:
    """Method of load balancing."""

    kind: str  # loss, selection_bias or none
    bias_step: float  # change of a selection bias per step, in the bias's unit, at logits of standard deviation 1
    pooled: bool = False  # an expert's load is that of all layers together


def count_load(routings: list[Routing], rows_N: Int[Tensor, "N"]) -> Int[Tensor, "L E"]:
    """Number of the tokens `rows_N` that chose each expert."""
    return torch.stack([count_choices(routing.chosen_TK[rows_N], routing.logits_TE.shape[1]) for routing in routings])


def balance_loss(
    routings: list[Routing], load_LE: Int[Tensor, "L E"], rows_N: Int[Tensor, "N"], *, pooled: bool = False
) -> Float[Tensor, ""]:
    """Mean over layers of E · Σ_e (share of choices for e) · (mean probability of e); 1 for even load.

    `load_LE` is of this process or summed over all; `pooled`: all layers share the experts, and loads are averaged.
    Source: Switch Transformers, arXiv:2101.03961 eq. 4, per choice.
    """
    probability_LE = torch.stack([routing.logits_TE[rows_N].float().softmax(1).mean(0) for routing in routings])
    share_LE = load_LE / load_LE.sum(1, keepdim=True).clamp_min(1)
    if pooled:
        probability_LE, share_LE = probability_LE.mean(0, keepdim=True), share_LE.mean(0, keepdim=True)
    return probability_LE.shape[1] * (share_LE * probability_LE).sum(1).mean()


def z_loss(routings: list[Routing], rows_N: Int[Tensor, "N"]) -> Float[Tensor, ""]:
    """Mean over layers and tokens of (log Σ exp logits)².

    Source: ST-MoE, arXiv:2202.08906 eq. 5.
    """
    return torch.stack([routing.logits_TE[rows_N].float().logsumexp(1).square().mean() for routing in routings]).mean()


def sticky_loss(routings: list[Routing], rows_N: Int[Tensor, "N"], length: int) -> Float[Tensor, ""]:
    """Mean over layers, tokens and experts of the token before: −log of their share in this token's softmax, nats.

    Logits count in units of their standard deviation over experts, so that larger ones do not lower it. Sequences of
    `length` positions follow each other; their first tokens have none before them.
    """
    counts_N, before_N, parts = rows_N % length != 0, (rows_N - 1).clamp_min(0), []
    for routing in routings:
        logits_NE = routing.logits_TE[rows_N].float()
        std_N1 = logits_NE.detach().std(1, keepdim=True, correction=min(1, logits_NE.shape[1] - 1))
        log_NE = (logits_NE / std_N1.clamp_min(1e-12)).log_softmax(1)
        losses_N = -log_NE.gather(1, routing.chosen_TK[before_N]).mean(1)
        parts.append((losses_N * counts_N).sum() / counts_N.sum().clamp_min(1))
    return torch.stack(parts).mean()


def entropy(routings: list[Routing], rows_N: Int[Tensor, "N"]) -> Float[Tensor, ""]:
    """Mean entropy of the softmax over experts, in nats; log E where all logits are equal."""
    parts = []
    for routing in routings:
        log_TE = routing.logits_TE[rows_N].detach().float().log_softmax(1)
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


def autocast(settings: TrainConfig, device: torch.device) -> torch.autocast:
    """The number format of matrix products; Trainer's own autocast would also copy the logits to float32."""
    rounded = settings.precision == "bfloat16"
    # FSDP frees the weights behind each layer, and a cache would keep their copies.
    return torch.autocast(device.type, torch.bfloat16, enabled=rounded, cache_enabled=not settings.fsdp)


@dataclass
class RunningMetrics:
    """Sums of this process since the last log line; on the device, so that nothing waits for them.

    `pooled`: an expert's load is the sum over all layers.
    """

    pooled: bool = False
    sums: dict[str, Tensor] = field(default_factory=dict)
    load_LE: Tensor | None = None

    def add(self, load_LE: Tensor, **values: Tensor | float) -> None:
        """Add one forward pass."""
        for name, value in values.items():
            number = value if isinstance(value, Tensor) else torch.full((), value, device=load_LE.device)
            amount = number.detach().double()
            self.sums[name] = self.sums[name] + amount if name in self.sums else amount
        self.load_LE = load_LE if self.load_LE is None else self.load_LE + load_LE

    def collect(self) -> dict[str, float]:
        """Means over all processes; resets the sums. Empty if nothing was added.

        `load_max_over_mean` is the highest of all layers; `dead_experts` counts experts that no token chose.
        """
        if self.load_LE is None:
            return {}
        names = sorted(self.sums)
        totals = dict(zip(names, add_up(torch.stack([self.sums[name] for name in names])).tolist(), strict=True))
        load_LE = add_up(self.load_LE).double()
        if self.pooled:
            load_LE = load_LE.sum(0, keepdim=True)
        ratio_L = load_LE.max(1).values / load_LE.mean(1).clamp_min(1e-9)
        self.sums, self.load_LE = {}, None
        counts = dict.fromkeys(("language_model", "logits"), "items")
        counts |= dict.fromkeys(("balance", "router_z", "sticky", "router_entropy"), "passes")
        means = {name: totals[name] / totals[count] for name, count in counts.items() if name in totals}
        return means | {
            "load_max_over_mean": float(ratio_L.max()),
            "load_max_over_mean_average": float(ratio_L.mean()),
            "dead_experts": int((load_LE == 0).sum()),
            "tokens": int(totals["tokens"]),
        }


class Objective:
    """The loss of a micro-batch."""

    def __init__(
        self, settings: TrainConfig, watch: RouterWatch, teacher: PreTrainedModel | None, balance: Balance
    ) -> None:
        """`watch` observes the model that is passed to `loss`; `teacher` is the frozen dense model for distillation."""
        self.settings, self.watch, self.teacher, self.balance = settings, watch, teacher, balance
        self.metrics = RunningMetrics(balance.pooled)
        self.load_LE: Tensor | None = None  # since the last optimizer step, of this process

    def loss(self, model: nn.Module, inputs: Mapping[str, Tensor], items: Tensor, parts: int, world: int) -> Tensor:
        """Forward pass and loss.

        Args:
            model: the MoE, wrapped or not.
            inputs: `input_ids`, `attention_mask` and `labels` of ``(B, T)``; `rows`, the tokens without padding.
            items: supervised tokens of the whole optimizer step, in all processes.
            parts: micro-batches of this process in the step.
            world: number of processes, over which gradients are averaged.
        """
        labels_BT, mask_BT, rows_N = inputs["labels"], inputs["attention_mask"], inputs["rows"]
        with self.watch.collect() as routings, autocast(self.settings, labels_BT.device):
            logits_BTV = model(input_ids=inputs["input_ids"], attention_mask=mask_BT, use_cache=False).logits
        with nullcontext() if self.settings.language_model else torch.no_grad():
            # The divergence reads the logits in its own backward pass.
            alone = self.teacher is None
            sums = {"language_model": token_losses(logits_BTV, labels_BT, inplace_backward=alone).sum()}
        if self.teacher is not None:
            with torch.no_grad(), autocast(self.settings, labels_BT.device):
                taught = self.teacher(input_ids=inputs["input_ids"], attention_mask=mask_BT, use_cache=False)
            sums["logits"] = prediction_distance(logits_BTV, taught.logits, predicts(labels_BT))
        weighted = [getattr(self.settings, name) * value for name, value in sums.items()]
        loss = torch.stack(weighted).sum() * world / items
        load_LE = count_load(routings, rows_N)
        self.load_LE = load_LE if self.load_LE is None else self.load_LE + load_LE
        means = self._router_means(routings, load_LE, rows_N, labels_BT.shape[1])
        loss = loss + sum((weight * value for weight, value in means.values()), start=loss.new_zeros(())) / parts
        self.metrics.add(
            load_LE,
            **sums,
            **{name: value for name, (_, value) in means.items()},
            router_entropy=entropy(routings, rows_N),
            items=supervised_tokens(labels_BT).sum(),
            tokens=float(len(rows_N)),
            passes=1.0,
        )
        return loss

    def _router_means(
        self, routings: list[Routing], load_LE: Tensor, rows_N: Tensor, length: int
    ) -> dict[str, tuple[float, Tensor]]:
        """Auxiliary losses as means over tokens: name → (weight, value)."""
        settings, means = self.settings, {}
        if self.balance.kind == "loss" and settings.balance_weight:
            even = balance_loss(routings, add_up(load_LE), rows_N, pooled=self.balance.pooled)
            means["balance"] = (settings.balance_weight, even)
        if settings.z_weight:
            means["router_z"] = (settings.z_weight, z_loss(routings, rows_N))
        if settings.sticky_weight:
            means["sticky"] = (settings.sticky_weight, sticky_loss(routings, rows_N, length))
        return means

    def take_load(self) -> Tensor:
        """``(L, E)`` tokens that chose each expert since the last call, summed over all processes."""
        assert self.load_LE is not None, "asked before the first forward pass"
        load_LE, self.load_LE = self.load_LE, None
        return add_up(load_LE)
