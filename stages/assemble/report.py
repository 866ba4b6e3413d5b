"""What assembly tells the user."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from models.families.moe import MoETarget
from models.routing import LinearRouter
from models.shape import Shape
from stages.contracts.job import Table
from stages.contracts.partition import Partition


@dataclass(frozen=True)
class RouterReport:
    """One layer's router and how it routes the calibration text, on the CPU."""

    rows_ED: Tensor
    bias_E: Tensor
    scale_EN: Tensor  # of the experts' down columns, for what gates and copies weigh
    moments_2E: Tensor  # Σ g and Σ g² of every expert's gates
    load_E: Tensor  # 1 = even share
    agreement: float  # share of the oracle's experts it chooses
    error: float  # of the layer's output, relative, before alignment

    @property
    def router(self) -> LinearRouter:
        """The router."""
        return LinearRouter(self.rows_ED, self.bias_E)


def summarise(reports: Sequence[RouterReport], target: MoETarget, shape: Shape, partition: Partition) -> Table:
    """One row per layer; the chance level stands in the notes."""
    rows = [
        [
            layer,
            f"{report.agreement:.3f}",
            f"{report.error:.4f}",
            f"{report.load_E.max():.2f}",
            int((report.load_E == 0).sum()),
        ]
        for layer, report in enumerate(reports)
    ]
    share = shape.active_width / partition.width
    notes = [
        f"{target.architecture}: {shape.experts} experts of {shape.n}, {shape.top_k} per token, {shape.always_on} "
        f"always on ({share:.0%} of the dense FFN's {partition.width} units)",
        f"agreement by chance would be {shape.top_k / shape.experts:.3f}",
    ]
    if all(bool((report.scale_EN == 1).all()) for report in reports) and int(partition.multiplicity.max()) > 1:
        notes.append("neurons with copies in several experts are unscaled here (assemble.mode=train scales them)")
    unused = sum(int((report.load_E == 0).sum()) for report in reports)
    if unused:
        notes.append(f"{unused} experts are chosen by no calibration token: assemble.balance=0.01, or fewer experts")
    columns = ["layer", "agreement with the oracle", "output error", "load max/mean", "unused experts"]
    return Table("assemble", columns, rows, notes)
