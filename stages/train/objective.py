"""The training loss of one forward pass, and the logged figures."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from models.training import RouterWatch, Routing
from stages.losses import prediction_distance, supervised_tokens, token_losses
from stages.text.batches import IGNORED
from stages.train.config import TrainConfig
from stages.train.routers import Balance, add_up, balance_loss, count_load, entropy, z_loss


def autocast(settings: TrainConfig, device: torch.device) -> torch.autocast:
    """The number format of matrix products; Trainer's own autocast would also copy the logits to float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bfloat16")


def predicts(labels_BT: Int[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Positions whose next token counts in the loss."""
    return pad(labels_BT[:, 1:], (0, 1), value=IGNORED) != IGNORED


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
            amount = torch.as_tensor(value, dtype=torch.float64, device=load_LE.device).detach()
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
        counts |= dict.fromkeys(("balance", "router_z", "router_entropy"), "passes")
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
            inputs: `input_ids`, `attention_mask` and `labels` of ``(B, T)``.
            items: supervised tokens of the whole optimizer step, in all processes.
            parts: micro-batches of this process in the step.
            world: number of processes, over which gradients are averaged.
        """
        labels_BT, mask_BT = inputs["labels"], inputs["attention_mask"]
        mask_T = mask_BT.flatten().bool()
        with self.watch.collect() as routings, autocast(self.settings, labels_BT.device):
            logits_BTV = model(input_ids=inputs["input_ids"], attention_mask=mask_BT, use_cache=False).logits
        with nullcontext() if self.settings.language_model else torch.no_grad():
            # The divergence reads the logits in its own backward pass.
            alone = self.teacher is None
            sums = {"language_model": token_losses(logits_BTV, labels_BT, inplace_backward=alone).sum()}
        if self.teacher is not None:
            with torch.no_grad():
                taught = self.teacher(input_ids=inputs["input_ids"], attention_mask=mask_BT, use_cache=False)
            sums["logits"] = prediction_distance(logits_BTV, taught.logits, predicts(labels_BT))
        weighted = [getattr(self.settings, name) * value for name, value in sums.items()]
        loss = torch.stack(weighted).sum() * world / items
        load_LE = count_load(routings, mask_T)
        self.load_LE = load_LE if self.load_LE is None else self.load_LE + load_LE
        means = self._router_means(routings, load_LE, mask_T)
        loss = loss + sum((weight * value for weight, value in means.values()), start=loss.new_zeros(())) / parts
        self.metrics.add(
            load_LE,
            **sums,
            **{name: value for name, (_, value) in means.items()},
            router_entropy=entropy(routings, mask_T),
            items=supervised_tokens(labels_BT).sum(),
            tokens=mask_T.sum(),
            passes=1.0,
        )
        return loss

    def _router_means(
        self, routings: list[Routing], load_LE: Tensor, mask_T: Tensor
    ) -> dict[str, tuple[float, Tensor]]:
        """Auxiliary losses as means over tokens: name → (weight, value)."""
        settings, means = self.settings, {}
        if self.balance.kind == "loss" and settings.balance_weight:
            even = balance_loss(routings, add_up(load_LE), mask_T, pooled=self.balance.pooled)
            means["balance"] = (settings.balance_weight, even)
        if settings.z_weight:
            means["router_z"] = (settings.z_weight, z_loss(routings, mask_T))
        return means

    def take_load(self) -> Tensor:
        """``(L, E)`` tokens that chose each expert since the last call, summed over all processes."""
        assert self.load_LE is not None, "asked before the first forward pass"
        load_LE, self.load_LE = self.load_LE, None
        return add_up(load_LE)
