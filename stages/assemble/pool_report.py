"""What the assembly of a global pool tells the user."""

from collections.abc import Sequence

import torch

from models.shape import Shape
from stages.assemble.report import RouterReport
from stages.contracts.job import Table
from stages.contracts.pool_partition import PoolPartition


def summarise_pool(reports: Sequence[RouterReport], partition: PoolPartition, shape: Shape) -> Table:
    """One row per layer: how well its router chooses, and how far it keeps to the experts cut from it."""
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
    slots, units = shape.experts * shape.n, partition.layers * partition.width
    notes = [
        f"one pool of {shape.experts} experts of {shape.n} for {partition.layers} layers ({slots / units:.0%} of the "
        f"dense FFNs' {units:,} units), {shape.top_k} per token and layer, {shape.always_on} always on a layer",
        "the error oracle chooses the experts that take most off the layer's error; agreement by chance would be "
        f"{shape.top_k / shape.experts:.3f}; all layers together: load max/mean {float(load_E.max()):.2f}, "
        f"{int((load_E == 0).sum())} experts chosen by no layer",
    ]
    oracle = "agreement with the error oracle"
    columns = ["layer", "experts given", "own chosen", oracle, "output error", "experts not used"]
    return Table("assemble", columns, rows, notes)
