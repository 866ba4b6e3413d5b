"""One captured tensor: what it is, where it comes from, where it lies."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from instruments.errors import ContractError

# What became of the bytes. statistics: only the numbers of the row were kept; dropped: not even those.
STORED, STATISTICS, DROPPED = "stored", "statistics", "dropped"
_NESTED = ("source", "placement", "statistics", "rounding")


@dataclass(frozen=True)
class Source:
    """Which tensor of which call it is."""

    step: int
    microbatch: int  # forward passes of the model within the step, from 0
    call: int  # of the module within the microbatch, from 0
    direction: str  # forward or backward
    recompute: bool  # of a forward pass that was run again for the backward pass
    module: str  # as the model names it
    layer: int | None  # of the decoder, from 0; None outside it
    layer_type: str  # linear, attention or experts
    tensor: str  # input, weight, grad_output, query ...


@dataclass(frozen=True)
class Placement:
    """Where a process's part lies in the tensor that all processes hold together."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]  # of the first piece
    # Axis along which the part is made of so many pieces of the whole, evenly spread over it; None: it is one piece.
    pieces: tuple[int, int] | None = None
    tokens: tuple[int, int, int] | None = None  # first position, distance, number kept; None: all of them


@dataclass(frozen=True)
class Statistics:
    """Of the finite values; None where there is none."""

    minimum: float | None
    maximum: float | None
    mean: float | None
    std: float | None  # of the population
    nonfinite: int  # NaN and infinite values

    @property
    def all_zero(self) -> bool:
        """Whether every value is 0."""
        return self.minimum == 0 and self.maximum == 0 and not self.nonfinite


@dataclass(frozen=True)
class RoundingError:
    """What rounding into a number format did to a tensor."""

    relative_l2: float  # ‖rounded − x‖ ÷ ‖x‖
    sqnr_db: float | None  # 10·log10(‖x‖² ÷ ‖rounded − x‖²); None where nothing was lost
    max_abs: float


@dataclass(frozen=True)
class TensorRecord:
    """A row of the index."""

    name: str
    counter: int
    timestamp: str
    rank: int
    source: Source
    parallel: Mapping[str, tuple[int, int]]  # tp, pp ...: this process's coordinate and how many there are
    placement: Placement
    shape: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool
    quant_type: str  # what the tensor really is: fp32, bf16, nf4 ...; of a rounded copy, what it is rounded into
    label: str | None  # what it was said to be
    autocast: str | None  # what kernels computed in, where that is decided by autocast
    status: str
    statistics: Statistics | None
    file: str | None  # inside the folder of the dump
    key: str | None  # inside the file; several records may share one
    rounded_from: str | None = None  # name of the record of which this is a rounded copy
    rounding: RoundingError | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def to_row(self) -> dict[str, Any]:
        """As JSON holds it."""
        nested = {name: vars(part) for name in _NESTED if (part := getattr(self, name)) is not None}
        return {**vars(self), **nested}  # asdict copies every value, at ten times the cost

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "TensorRecord":
        """What `to_row` made. Raises ContractError."""
        try:
            return cls(
                **{
                    **row,
                    "source": Source(**row["source"]),
                    "parallel": {name: (at, of) for name, (at, of) in row["parallel"].items()},
                    "placement": Placement(**{name: axes and tuple(axes) for name, axes in row["placement"].items()}),
                    "shape": tuple(row["shape"]),
                    "statistics": row["statistics"] and Statistics(**row["statistics"]),
                    "rounding": row["rounding"] and RoundingError(**row["rounding"]),
                }
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ContractError(f"a row of the index cannot be read: {error!r}", do="dump again") from error


def make_name(timestamp: str, counter: int, source: Source, quant_type: str) -> str:
    """`{timestamp}_{counter}_{layer_type}_L{layer}_{operation}_{quant_type}_{tensor_name}`.

    The counter alone is unique within a dump, over all its processes.
    """
    layer = "none" if source.layer is None else source.layer
    return f"{timestamp}_{counter}_{source.layer_type}_L{layer}_{source.direction}_{quant_type}_{source.tensor}"


def now() -> str:
    """UTC to the microsecond, without a character that file systems or the name's own parts give a meaning."""
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
