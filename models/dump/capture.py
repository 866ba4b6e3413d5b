"""What the hooks hand to the writer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from models.dump.number_formats import autocast_type_of, quant_type_of
from models.dump.records import DROPPED, STATISTICS, STORED, Placement, RoundingError, Source, Statistics
from models.dump.ring import Slot


@dataclass(eq=False)
class Held:
    """Content that was copied or measured once, whoever shares it. The writer fills in what it finds."""

    status: str
    data: Tensor | None = None  # on the CPU; of status statistics its moments, unless they are known already
    slot: Slot | None = None
    wait: Callable[[], None] | None = None  # before `data` is read
    statistics: Statistics | None = None
    file: str | None = None
    key: str | None = None
    rounded: "Rounded | None" = None

    @classmethod
    def dropped(cls) -> "Held":
        """Nothing but the fact."""
        return cls(DROPPED)

    @classmethod
    def measured(cls, statistics: Statistics) -> "Held":
        """Numbers alone."""
        return cls(STATISTICS, statistics=statistics)

    @property
    def stored(self) -> bool:
        """Whether its bytes are kept."""
        return self.status == STORED


@dataclass(frozen=True)
class Rounded:
    """A copy rounded into a number format, as it was written."""

    quant_type: str
    statistics: Statistics
    error: RoundingError
    file: str
    key: str
    dtype: torch.dtype


@dataclass(frozen=True)
class Facts:
    """What is recorded of a tensor beside its content."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool
    quant_type: str
    autocast: str | None

    @classmethod
    def of(cls, tensor: Tensor, kept: Tensor) -> "Facts":
        """Of a tensor, and the part of it that is kept."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(
            tuple(kept.shape),
            dtype,
            str(tensor.device),
            tensor.requires_grad,
            quant_type_of(tensor),
            autocast_type_of(tensor),
        )


@dataclass(frozen=True, eq=False)
class Capture:
    """One tensor of one call, on its way to the index."""

    counter: int
    timestamp: str
    source: Source
    placement: Placement
    facts: Facts
    held: Held
