"""Dense and carved model side by side on held-out text, as transformers runs them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from models.ffn import DenseFFN, ffn_modules
from models.shape import Shape
from stages.data.batches import TokenBatch
from stages.evaluate.baselines import LayerFacts
from stages.evaluate.fidelity import LayerFidelity
from stages.evaluate.native import count_parameters, load_carved, measure_loss, measure_speed, watch_ffns
from stages.evaluate.report import LayerResult, ModelCost
from stages.metrics.loss import MeanLoss


@dataclass(frozen=True)
class Comparison:
    """What was measured of both."""

    losses: Mapping[str, MeanLoss]
    costs: Mapping[str, ModelCost]
    layers: Sequence[LayerResult]


def compare(
    dense: PreTrainedModel,
    checkpoint: Path,
    batches: Sequence[TokenBatch],
    facts_of: Callable[[int, DenseFFN], LayerFacts],
    shape: Shape,
    speed_tokens: int,
) -> Comparison:
    """Loss, size and speed of both models, and how each carved FFN follows its dense one."""
    carved = load_carved(checkpoint, dense)
    models = {"dense": dense, "carved": carved}
    fidelities = [
        LayerFidelity.start(facts_of(index, DenseFFN.of(mlp))) for index, mlp in enumerate(ffn_modules(dense))
    ]
    masks = iter([batch.attention_mask.bool().to(carved.device) for batch in batches])
    mask_BT: Tensor

    def on_ffn(layer: int, x_BTD: Tensor, output_BTD: Tensor) -> None:
        nonlocal mask_BT
        if layer == 0:
            mask_BT = next(masks)
        fidelities[layer].add(x_BTD, output_BTD, mask_BT)

    losses = {"dense": measure_loss(dense, batches, "dense")}
    with watch_ffns(carved, on_ffn):
        losses["carved"] = measure_loss(carved, batches, "carved")
    speed = measure_speed(models, batches, speed_tokens) if speed_tokens else {}
    costs = {}
    for name, model in models.items():
        total, active = count_parameters(model, shape)
        costs[name] = ModelCost(total, active, speed.get(name))
    return Comparison(losses, costs, [result_of(fidelity) for fidelity in fidelities])


def result_of(fidelity: LayerFidelity) -> LayerResult:
    """The figures of one layer."""
    unused = int((fidelity.load_E == 0).sum())
    return LayerResult(fidelity.error, fidelity.agreement, fidelity.imbalance, unused)
