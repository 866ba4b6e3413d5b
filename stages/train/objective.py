"""One forward pass of training: the loss it adds to the optimizer step, and what is to be known about it."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from models.training import RouterWatch, Routing
from stages.losses import prediction_distance, supervised_tokens, token_losses
from stages.text.sequences import IGNORED
from stages.train.config import TrainConfig
from stages.train.routers import Balance, add_up, balance_loss, count_load, entropy, z_loss


def predicts(labels_BT: Int[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Positions whose next token counts."""
    return pad(labels_BT[:, 1:], (0, 1), value=IGNORED) != IGNORED


def next_token_loss(logits_BTV: Float[Tensor, "B T V"], labels_BT: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
    """Σ −log p(next token), in nats."""
    return token_losses(logits_BTV, labels_BT).sum()


def hidden_distance(
    student: tuple[Tensor, ...], teacher: tuple[Tensor, ...], counts_BT: Bool[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """Σ over tokens of ‖student − teacher‖² / ‖teacher‖², mean over layers; the embedding is left out.

    Args:
        student: hidden states ``(B, T, D)`` before the first layer and after each.
        teacher: the same of the dense model.
        counts_BT: tokens that count.
    """
    layers = list(zip(student[1:], teacher[1:], strict=True))
    distances = [_relative(ours[counts_BT].float(), theirs[counts_BT].float()) for ours, theirs in layers]
    return torch.stack(distances).mean()


def _relative(ours_tD: Tensor, theirs_tD: Tensor) -> Tensor:
    return ((ours_tD - theirs_tD).square().sum(1) / theirs_tD.square().sum(1).clamp_min(1e-12)).sum()


@dataclass(frozen=True)
class TeacherOutput:
    """What the dense model makes of a batch."""

    logits_BTV: Tensor
    hidden: tuple[Tensor, ...]  # (B, T, D) before the first layer and after each; empty where nobody asked


@dataclass(frozen=True)
class Teacher:
    """The frozen dense model, and what is wanted of it."""

    model: PreTrainedModel
    hidden: bool

    @torch.no_grad()
    def teach(self, input_ids: Tensor, attention_mask: Tensor) -> TeacherOutput:
        """Its predictions and, where wanted, its hidden states."""
        output = self.model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False, output_hidden_states=self.hidden
        )
        return TeacherOutput(output.logits, output.hidden_states or ())


@dataclass
class RunningMetrics:
    """Sums since the last log line of this process; on the device, so that nothing waits for them.

    Where experts are `pooled`, their load is that of all layers together.
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
        """Figures over all processes; the sums start again."""
        if self.load_LE is None:
            return {}
        names = sorted(self.sums)
        totals = dict(zip(names, add_up(torch.stack([self.sums[name] for name in names])).tolist(), strict=True))
        load_LE = add_up(self.load_LE).double()
        self.sums, self.load_LE = {}, None
        return figures(totals, load_LE.sum(0, keepdim=True) if self.pooled else load_LE)


def figures(totals: Mapping[str, float], load_LE: Tensor) -> dict[str, float]:
    """What a log line says, from sums over passes and tokens.

    `load_max_over_mean` is of the layer where it is highest, `dead_experts` counts those that no token chose.
    """
    items, passes = totals["items"], totals["passes"]
    found = {"language_model": totals["language_model"] / items}
    found |= {name: totals[name] / items for name in ("logits", "hidden") if name in totals}
    found |= {name: totals[name] / passes for name in ("balance", "router_z", "router_entropy") if name in totals}
    ratio_L = load_LE.max(1).values / load_LE.mean(1).clamp_min(1e-9)
    return found | {
        "load_max_over_mean": float(ratio_L.max()),
        "load_max_over_mean_average": float(ratio_L.mean()),
        "dead_experts": int((load_LE == 0).sum()),
        "tokens": int(totals["tokens"]),
    }


class Objective:
    """The loss of a micro-batch."""

    def __init__(
        self, settings: TrainConfig, watch: RouterWatch, teacher: Teacher | None, *, balance: Balance, pooled: bool
    ) -> None:
        """Compose it.

        Args:
            settings: of the training.
            watch: of the routers of the model that will be passed to `loss`.
            teacher: None where nothing is distilled.
            balance: how load is evened out.
            pooled: all layers share the experts.
        """
        self.settings, self.watch, self.teacher = settings, watch, teacher
        self.balance, self.pooled = balance, pooled
        self.metrics = RunningMetrics(pooled)
        self.load_LE: Tensor | None = None  # since the last optimizer step, of this process

    def loss(self, model: nn.Module, inputs: Mapping[str, Tensor], items: Tensor, parts: int, world: int) -> Tensor:
        """Forward pass and loss.

        Args:
            model: the MoE, wrapped or not.
            inputs: `input_ids`, `attention_mask` and `labels` of ``(B, T)``.
            items: supervised tokens of the whole optimizer step, all processes together.
            parts: micro-batches of this process in the step.
            world: processes; their gradients will be averaged.
        """
        labels_BT, mask_T = inputs["labels"], inputs["attention_mask"].flatten().bool()
        with self.watch.collect() as routings:
            output = model(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                use_cache=False,
                output_hidden_states=bool(self.settings.hidden),
            )
        sums = self._token_sums(output.logits, output.hidden_states or (), inputs)
        weights = {name: getattr(self.settings, name) for name in sums}
        loss = torch.stack([weights[name] * value for name, value in sums.items()]).sum() * world / items
        load_LE = count_load(routings, mask_T)
        self.load_LE = load_LE if self.load_LE is None else self.load_LE + load_LE
        means = self._router_means(routings, load_LE, mask_T)
        loss = loss + sum((weight * value for weight, value in means.values()), start=loss.new_zeros(())) / parts
        with torch.no_grad():
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

    def _token_sums(
        self, logits_BTV: Tensor, hidden: tuple[Tensor, ...], inputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Sums over supervised tokens, by the name of the setting that weighs them."""
        settings, labels_BT = self.settings, inputs["labels"]
        with nullcontext() if settings.language_model else torch.no_grad():
            sums = {"language_model": next_token_loss(logits_BTV, labels_BT)}
        if self.teacher is None:
            return sums
        taught = self.teacher.teach(inputs["input_ids"], inputs["attention_mask"])
        counts_BT = predicts(labels_BT)
        if settings.logits:
            sums["logits"] = prediction_distance(logits_BTV, taught.logits_BTV, counts_BT, settings.temperature)
        if settings.hidden:
            sums["hidden"] = hidden_distance(hidden, taught.hidden, counts_BT)
        return sums

    def _router_means(
        self, routings: list[Routing], load_LE: Tensor, mask_T: Tensor
    ) -> dict[str, tuple[float, Tensor]]:
        """Means over tokens, with the weight of each."""
        settings, means = self.settings, {}
        if self.balance.kind == "loss" and settings.balance_weight:
            even = balance_loss(routings, add_up(load_LE), mask_T, pooled=self.pooled)
            means["balance"] = (settings.balance_weight, even)
        if settings.z_weight:
            means["router_z"] = (settings.z_weight, z_loss(routings, mask_T))
        return means

    def take_load(self) -> Tensor:
        """``(L, E)`` tokens that chose each expert since this was last asked, all processes together."""
        assert self.load_LE is not None, "asked before the first forward pass"
        load_LE, self.load_LE = self.load_LE, None
        return add_up(load_LE)
