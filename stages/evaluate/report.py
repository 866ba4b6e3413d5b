"""The evaluation as a table, as JSON and as Markdown."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from models.config import MoEShape
from stages.artifacts.job import Table
from stages.artifacts.rendering import in_millions, render
from stages.evaluate.config import BASELINES
from stages.losses import MeanLoss

DESCRIPTIONS = {"dense": "dense model", "carved": "this MoE", **BASELINES}


@dataclass(frozen=True)
class ModelCost:
    """Size and speed of one model."""

    parameters: int
    active_parameters: int
    tokens_per_second: float | None  # prefill; None: not timed


@dataclass(frozen=True)
class LayerResult:
    """Figures of one carved FFN on held-out text."""

    error: float  # Σ‖dense − MoE‖² / Σ‖dense‖²; 0 where the dense output is 0
    agreement: float  # share of the router's choices that the oracle would make too
    imbalance: float  # largest load over the mean load
    unused_experts: int
    load: Sequence[float] = ()  # of every expert, 1 = an even share
    saved: float | None = None  # fall of the loss, nats per token, with this layer dense; None: not measured


@dataclass(frozen=True)
class Evaluation:
    """All results."""

    shape: MoEShape
    width: int
    heldout_tokens: int
    losses: Mapping[str, MeanLoss]
    costs: Mapping[str, ModelCost]
    layers: Sequence[LayerResult]
    trained: bool = False  # the MoE is the checkpoint of stage=train
    # Dense layers → the setting of an architecture that supports them; nothing if the MoE's own does.
    target_for: Callable[[Sequence[int]], Sequence[str]] = lambda _layers: ()
    dtype: str = "float32"  # in which both models were computed; without a pool, the baselines are always in float32

    def gap(self, name: str) -> float:
        """Loss above the dense model's, nats per token."""
        return self.losses[name].nats - self.losses["dense"].nats


def summarise(evaluation: Evaluation) -> Table:
    """One row per model."""
    rows = []
    for name, loss in evaluation.losses.items():
        cost = evaluation.costs.get(name)
        rows.append(
            [
                DESCRIPTIONS[name],
                f"{loss.perplexity:.3f}",
                f"{evaluation.gap(name):+.4f}",
                in_millions(cost.active_parameters) if cost else "",
                in_millions(cost.parameters) if cost else "",
                f"{cost.tokens_per_second:,.0f}" if cost and cost.tokens_per_second else "",
            ]
        )
    columns = ["model", "perplexity", "loss gap (nats)", "active parameters", "parameters", "tokens/s"]
    return Table("evaluate", columns, rows, notes(evaluation))


def notes(evaluation: Evaluation) -> list[str]:
    """Notes on the shape, the averages over layers, and layers to leave dense."""
    shape = evaluation.shape
    layers = [layer for index, layer in enumerate(evaluation.layers) if index not in shape.dense_layers]
    mean_error = sum(layer.error for layer in layers) / len(layers)
    agreement = sum(layer.agreement for layer in layers) / len(layers)
    trained = "this MoE is trained by stage=train; the dense model and the baselines are not"
    pooled = (
        "one pool of experts for all layers: active parameters are counted in every layer that uses them; masks, "
        "published methods and oracles, which choose among one layer's neurons, are left out"
    )
    formats = (
        f"both models are computed in {evaluation.dtype}, the baselines in float32, so the baselines' gaps contain the "
        "dense model's rounding; model.dtype=float32 compares all in one format"
    )
    mixed = evaluation.dtype != "float32" and not shape.pooled and evaluation.losses.keys() - {"dense", "carved"}
    return [
        f"{evaluation.heldout_tokens:,} held-out tokens; {shape.active_width} of {evaluation.width} FFN neurons "
        f"active per token ({shape.always_on} always on + {shape.top_k} of {shape.experts} experts of {shape.n})",
        f"mean reconstruction error of the FFN outputs {mean_error:.3f}; router agrees with the "
        f"{oracle_name(shape)} on "
        f"{agreement:.0%} of its choices (chance {shape.top_k / shape.experts:.0%}); load max/mean "
        f"{max(layer.imbalance for layer in layers):.2f} in the worst layer",
        *([trained] if evaluation.trained else []),
        *([formats] if mixed else []),
        *([f"layers {', '.join(map(str, shape.dense_layers))} stay dense"] if shape.dense_layers else []),
        *([pooled] if shape.pooled else []),
        *costly_layers(evaluation),
    ]


def costly_layers(evaluation: Evaluation) -> list[str]:
    """A note on the layers to leave dense: those that cost over twice the average, at most a quarter of all.

    All dense layers together get at most half of the active neurons, since the experts of the others need some.
    """
    saved = {index: layer.saved for index, layer in enumerate(evaluation.layers) if layer.saved is not None}
    if not saved:
        return []
    shape, usual, depth = evaluation.shape, sum(saved.values()) / len(saved), len(evaluation.layers)
    if usual <= 0:
        return [f"each layer's carve costs {usual:.4f} nats on average, too little for a comparison of layers"]
    costly = sorted((index for index in saved if saved[index] > 2 * usual), key=lambda index: -saved[index])
    if not costly:
        return [f"each layer's carve costs {usual:.4f} nats on average, none over twice as much"]
    share = shape.active_share(evaluation.width, depth)
    room = 0 if shape.pooled else max(0, int(share * depth / 2) - len(shape.dense_layers))
    costly, advised = costly[: max(1, depth // 4)], costly[: min(max(1, depth // 4), room)]
    named = ", ".join(f"{index} ({saved[index]:.4f})" for index in advised or costly)
    found = f"a layer's carve costs {usual:.4f} nats on average, that of layer {named}"
    if not advised:
        reason = "one pool serves all layers" if shape.pooled else f"only {share:.0%} of the neurons are active"
        return [f"{found}; no more layers can stay dense, since {reason}"]
    kept = sorted([*shape.dense_layers, *advised])
    words = " ".join([f"'dense_layers=[{','.join(map(str, kept))}]'", *evaluation.target_for(kept)])
    return [f"{found}: {words} leaves them dense, and the others pay for it"]


def oracle_name(shape: MoEShape) -> str:
    """Output oracle: the experts of largest output norm. Error oracle, in a pool: those of largest error drop."""
    return "error oracle" if shape.pooled else "output oracle"


def layer_table(evaluation: Evaluation) -> Table:
    """One row per layer."""
    measured = any(layer.saved is not None for layer in evaluation.layers)
    rows = [
        [
            index,
            f"{layer.error:.4f}",
            f"{layer.agreement:.3f}",
            f"{layer.imbalance:.2f}",
            layer.unused_experts,
            *([] if not measured else ["" if layer.saved is None else f"{layer.saved:+.4f}"]),
        ]
        for index, layer in enumerate(evaluation.layers)
    ]
    oracle = oracle_name(evaluation.shape)
    columns = ["layer", "reconstruction error", f"agreement with the {oracle}", "load max/mean", "unused experts"]
    columns += ["cost of its carve (nats)"] if measured else []
    return Table("layers", columns, rows)


def write_report(evaluation: Evaluation, folder: Path) -> None:
    """Write `evaluation.json` and `evaluation.md`."""
    record = {
        "shape": asdict(evaluation.shape),
        "dense_width": evaluation.width,
        "heldout_tokens": evaluation.heldout_tokens,
        "models": {
            name: {"loss": loss.nats, "perplexity": loss.perplexity, "gap": evaluation.gap(name)}
            | (asdict(evaluation.costs[name]) if name in evaluation.costs else {})
            for name, loss in evaluation.losses.items()
        },
        "layers": [asdict(layer) for layer in evaluation.layers],
    }
    (folder / "evaluation.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    tables = (summarise(evaluation), layer_table(evaluation))
    text = "\n".join(f"## {render(table, 'github')}\n" for table in tables)
    (folder / "evaluation.md").write_text(text, encoding="utf-8")
