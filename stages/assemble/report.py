"""The tables of stage=assemble."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.config import MoEShape
from models.routing import LinearRouter
from models.targets.base import MoETarget
from stages.artifacts.carve import Partition, PoolPartition
from stages.artifacts.job import Table
from stages.assemble.config import AssembleConfig
from stages.calibration.config import is_priced

# Recommended router_steps and balance if experts are unused and the setting is 0.
STEPS, PRICE = 200, 0.01


@dataclass(frozen=True)
class RouterReport:
    """One layer's router and how it routes the calibration text, on the CPU."""

    router: LinearRouter
    scale_EN: Tensor  # of the experts' down columns, compensates for gates and copies
    moments_2E: Tensor  # Σ g and Σ g² of every expert's gates
    load_E: Tensor  # 1 = even share
    agreement: float  # share of the contribution oracle's experts that it chooses; in a pool, of the error oracle's
    error: float  # of the layer's output, relative, before alignment


def summarise(
    reports: Mapping[int, RouterReport],
    target: MoETarget,
    shape: MoEShape,
    partition: Partition,
    assemble: AssembleConfig,
) -> Table:
    """One row per carved layer; the chance level is in the notes."""
    rows = [
        [layer, f"{one.agreement:.3f}", f"{one.error:.4f}", f"{one.load_E.max():.2f}", int((one.load_E == 0).sum())]
        for layer, one in reports.items()
    ]
    share = shape.active_width / partition.width
    notes = [
        f"{target.architecture}: {shape.experts} experts of {shape.n}, {shape.top_k} per token, {shape.always_on} "
        f"always on ({share:.0%} of the dense FFN's {partition.width} neurons)",
        "the contribution oracle chooses the experts of largest Σ|h|·‖d‖; agreement by chance would be "
        f"{shape.top_k / shape.experts:.3f}",
    ]
    if all(bool((report.scale_EN == 1).all()) for report in reports.values()) and int(partition.multiplicity.max()) > 1:
        notes.append("neurons with copies in several experts are unscaled here (assemble.mode=train scales them)")
    unused = sum(int((report.load_E == 0).sum()) for report in reports.values())
    if unused:
        notes.append(f"{unused} experts are chosen by no calibration token; {load_advice(assemble)} evens the load")
    columns = ["layer", "agreement with the contribution oracle", "output error", "load max/mean", "unused experts"]
    return Table("assemble", columns, rows, notes)


def load_advice(assemble: AssembleConfig) -> str:
    """Settings that give even load more weight in the routers of this stage."""
    words = [] if is_priced(assemble.router, pooled=False) else ["assemble.router=error"]
    words += [] if assemble.router_steps else [f"assemble.router_steps={STEPS}"]
    price = 10 * assemble.balance_weight(pooled=False) or PRICE
    return " ".join([*words, f"assemble.balance={price:g}"])


def summarise_pool(reports: Sequence[RouterReport], partition: PoolPartition, shape: MoEShape) -> Table:
    """One row per layer: how well its router chooses, and how often it chooses experts cut from the same layer."""
    given = partition.given
    rows = [
        [
            layer,
            given[layer],
            f"{float(report.load_E[partition.home == layer].sum() / report.load_E.sum()):.1%}",
            f"{report.agreement:.3f}",
            f"{report.error:.4f}",
            int((report.load_E == 0).sum()),
        ]
        for layer, report in enumerate(reports)
    ]
    load_E = torch.stack([report.load_E for report in reports]).mean(0)
    slots, neurons = shape.experts * shape.n, partition.layers * partition.width
    notes = [
        f"one pool of {shape.experts} experts of {shape.n} for {partition.layers} layers ({slots / neurons:.0%} of the "
        f"dense FFNs' {neurons:,} neurons), {shape.top_k} per token and layer, {shape.always_on} always on a layer",
        "the error oracle chooses the experts that reduce the layer's error most; agreement by chance would be "
        f"{shape.top_k / shape.experts:.3f}; all layers together: load max/mean {float(load_E.max()):.2f}, "
        f"{int((load_E == 0).sum())} experts chosen by no layer",
    ]
    oracle = "agreement with the error oracle"
    columns = ["layer", "experts given", "own chosen", oracle, "output error", "experts not used"]
    return Table("assemble", columns, rows, notes)
