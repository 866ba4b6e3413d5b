"""Dense and carved model side by side on held-out text, as transformers runs them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from models.capture.ffn_output import watch_ffns
from models.ffn import DenseFFN, GatedFFN, ffn_modules
from models.shape import Shape
from stages.data.batches import TokenBatch
from stages.evaluate.baselines import LayerFacts
from stages.evaluate.fidelity import LayerFidelity
from stages.evaluate.native import count_parameters, measure_speed
from stages.evaluate.report import LayerResult, ModelCost
from stages.metrics.loss import MeanLoss
from stages.metrics.model_loss import measure_loss


@dataclass(frozen=True)
class Comparison:
    """What was measured of both."""

    losses: Mapping[str, MeanLoss]
    costs: Mapping[str, ModelCost]
    layers: Sequence[LayerResult]


def compare(
    dense: PreTrainedModel,
    carved: PreTrainedModel,
    batches: Sequence[TokenBatch],
    facts_of: Callable[[int, DenseFFN], LayerFacts],
    shape: Shape,
    speed_tokens: int,
) -> Comparison:
    """Loss, size and speed of both models, and how each carved FFN follows its dense one."""
    models = {"dense": dense, "carved": carved}
    losses = {"dense": measure_loss(dense, batches, "dense")}
    losses["carved"], fidelities = follow_ffns(carved, batches, ffn_modules(dense), facts_of)
    speed = measure_speed(models, batches, speed_tokens) if speed_tokens else {}
    costs = {}
    for name, model in models.items():
        total, active = count_parameters(model, shape)
        costs[name] = ModelCost(total, active, speed.get(name))
    return Comparison(losses, costs, [result_of(fidelity) for fidelity in fidelities])


def follow_ffns(
    carved: PreTrainedModel,
    batches: Sequence[TokenBatch],
    dense: Sequence[GatedFFN],
    facts_of: Callable[[int, DenseFFN], LayerFacts],
) -> tuple[MeanLoss, list[LayerFidelity]]:
    """The carved model's loss, and every layer held against the dense FFN on the same inputs.

    The dense weights are taken anew for every batch: where they are plain that costs nothing, and where they are
    offloaded or quantised only one layer's are in memory at a time.
    """
    fidelities: list[LayerFidelity] = []
    masks = iter([batch.attention_mask.bool() for batch in batches])
    mask_BT: Tensor

    def on_ffn(layer: int, x_BTD: Tensor, output_BTD: Tensor) -> None:
        nonlocal mask_BT
        if layer == 0:
            mask_BT = next(masks)
        facts = facts_of(layer, DenseFFN.of(dense[layer], x_BTD))
        if layer == len(fidelities):
            fidelities.append(LayerFidelity.start(facts))
        fidelities[layer].add(facts, x_BTD, output_BTD, mask_BT.to(x_BTD.device))

    with watch_ffns(carved, on_ffn):
        loss = measure_loss(carved, batches, "carved")
    return loss, fidelities


def result_of(fidelity: LayerFidelity) -> LayerResult:
    """The figures of one layer."""
    unused = int((fidelity.load_E == 0).sum())
    load_E = fidelity.load_E / fidelity.load_E.mean()
    return LayerResult(fidelity.error, fidelity.agreement, fidelity.imbalance, unused, load_E.tolist())
