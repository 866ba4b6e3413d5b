"""The evaluation as a table and as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from models.config import MoEShape
from stages.artifacts.job import Table
from stages.artifacts.rendering import in_millions, show
from stages.evaluate.config import BASELINES
from stages.evaluate.samples import Sample
from stages.losses import MeanLoss

AS_ASSEMBLED = "this MoE before projection"  # of a pool, with its gates
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
    # Share of the router's choices that the oracle, which knows the experts' output norms, would make; None in a pool.
    agreement: float | None
    imbalance: float  # largest load over the mean load
    unused_experts: int
    load: Sequence[float] = ()  # of every expert, 1 = an even share


@dataclass(frozen=True)
class Evaluation:
    """All results."""

    shape: MoEShape
    width: int
    lacking: float  # `Decoder.lacking`
    heldout_tokens: int
    losses: Mapping[str, MeanLoss]
    costs: Mapping[str, ModelCost]
    layers: Sequence[LayerResult]
    trained: bool = False  # the MoE is the checkpoint of stage=train
    samples: Sequence[Sample] = ()
    dtype: str = "float32"  # in which both models were computed; without a pool, the baselines are always in float32

    def gap(self, name: str) -> float:
        """Loss above the dense model's, nats per token."""
        return self.losses[name].nats - self.losses["dense"].nats

    def gap_error(self, name: str) -> float | None:
        """Its standard error over sequences; None for the dense model, and where there is one sequence."""
        return None if name == "dense" else self.losses[name].gap_error(self.losses["dense"])


def summarise(evaluation: Evaluation) -> Table:
    """One row per model."""
    rows = []
    for name, loss in evaluation.losses.items():
        cost = evaluation.costs.get(name)
        rows.append(
            [
                AS_ASSEMBLED if name == "unaligned" and evaluation.shape.pooled else DESCRIPTIONS[name],
                f"{loss.perplexity:.3f}",
                f"{evaluation.gap(name):+.4f}",
                show(evaluation.gap_error(name), ".4f"),
                show(loss.divergence, ".4f"),
                show(loss.agreement, ".1%"),
                in_millions(cost.active_parameters) if cost else "",
                in_millions(cost.parameters) if cost else "",
                f"{cost.tokens_per_second:,.0f}" if cost and cost.tokens_per_second else "",
            ]
        )
    columns = ["model", "perplexity", "loss gap (nats)", "±", "KL", "same token"]
    columns += ["active parameters", "parameters", "tokens/s"]
    return Table("evaluate", columns, rows, notes(evaluation))


def notes(evaluation: Evaluation) -> list[str]:
    """Notes on the shape, the averages over layers, and what the figures do not compare."""
    shape = evaluation.shape
    layers = [layer for index, layer in enumerate(evaluation.layers) if index not in shape.dense_layers]
    mean_error = sum(layer.error for layer in layers) / len(layers)
    agreements = [layer.agreement for layer in layers if layer.agreement is not None]
    oracle = (
        f"; router agrees with the output oracle on {sum(agreements) / len(agreements):.0%} of its choices "
        f"(chance {shape.top_k / shape.experts:.0%})"
    ) if agreements else ""  # fmt: skip
    trained = "this MoE is trained by stage=train; the dense model and the baselines are not"
    pooled = (
        "one pool of experts for all layers: active parameters are counted in every layer that uses them; baselines "
        "that choose among one layer's neurons are left out"
    )
    formats = (
        f"both models are computed in {evaluation.dtype}, the baselines in float32, so the baselines' gaps contain the "
        "dense model's rounding; model.dtype=float32 compares all in one format"
    )
    mixed = evaluation.dtype != "float32" and not shape.pooled and evaluation.losses.keys() - {"dense", "carved"}
    return [
        f"{evaluation.heldout_tokens:,} held-out tokens; {shape.active_width} of {evaluation.width} FFN neurons "
        f"active per token ({shape.always_on} always on + {shape.top_k} of {shape.experts} experts of {shape.n})",
        f"mean reconstruction error of the FFN outputs {mean_error:.3f}{oracle}; load max/mean "
        f"{max(layer.imbalance for layer in layers):.2f} in the worst layer",
        "±: standard error of the gap over sequences; KL: KL(dense ‖ model) per token, nats; same token: where the "
        "dense model's most likely next token is the model's, too",
        "active parameters: without experts that a token is not sent to, without parts that see or hear, and without "
        "tables of embeddings, unless one is the output embedding, too: a token reads one row of each",
        *([trained] if evaluation.trained else []),
        *([formats] if mixed else []),
        *([f"layers {', '.join(map(str, shape.dense_layers))} stay dense"] if shape.dense_layers else []),
        *([pooled] if shape.pooled else []),
        *(sample.note for sample in evaluation.samples),
    ]


def write_report(evaluation: Evaluation, folder: Path) -> None:
    """Write `evaluation.json`, with the figures of every layer."""
    record = {
        "shape": asdict(evaluation.shape),
        "dense_width": evaluation.width,
        "lacking": evaluation.lacking,
        "heldout_tokens": evaluation.heldout_tokens,
        "models": {
            name: {"loss": loss.nats, "perplexity": loss.perplexity, "gap": evaluation.gap(name)}
            | {"gap_error": evaluation.gap_error(name), "kl": loss.divergence, "same_token": loss.agreement}
            | (asdict(evaluation.costs[name]) if name in evaluation.costs else {})
            for name, loss in evaluation.losses.items()
        },
        "layers": [asdict(layer) for layer in evaluation.layers],
        "samples": [asdict(sample) for sample in evaluation.samples],
    }
    (folder / "evaluation.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
