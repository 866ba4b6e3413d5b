"""Behaviour alignment: bend down_proj towards the dense model's output, in closed form.

With routing fixed, E‖target − MoE(x)‖² is a least-squares problem in the down columns; the ridge pulls to the columns
as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from instruments.errors import ConfigError
from models.experts import Block
from models.ffn import DenseFFN
from models.stream import LayerStream, StreamLayer
from stages.calibration.normal_equations import NormalEquations
from stages.calibration.token_stream import TokenStream
from stages.text.sequences import TokenBatch


def split_validation(batches: int, share: float) -> tuple[list[int], list[int]]:
    """Batches to fit on and batches to judge by, the latter spread evenly; at least one of each where there are two."""
    guards = min(max(1, round(share * batches)), max(0, batches - 1))
    held = {round((index + 0.5) * batches / guards - 0.5) for index in range(guards)} if guards else set()
    fitted = [index for index in range(batches) if index not in held]
    return fitted, sorted(held) or fitted


Target = Callable[[int, Tensor], Tensor]


class Alignable(Protocol):
    """A carved layer, linear in the down columns of its F neurons."""

    @property
    def width(self) -> int:
        """F."""

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Output (T, D)."""

    def run(self, x_TD: Tensor) -> tuple[list[Block], Tensor]:
        """What the columns are multiplied with, wherever it is not zero, and the output (T, D)."""

    def with_change(self, change_DF: Tensor) -> Self:
        """The same with something added to the columns."""


Carved = TypeVar("Carved", bound=Alignable)


class AlignmentSettings(Protocol):
    """What of a stage's settings concerns alignment."""

    alignment_target: str
    penalties: list[float]
    validation_share: float
    validate: bool


@dataclass(frozen=True)
class Alignment(Generic[Carved]):
    """What came of one layer: relative errors are on the guard batches."""

    carved: Carved
    error_before: float
    error_after: float
    penalty: float | None  # None: nothing made it better, the columns stayed


def relative_error(
    carved: Callable[[Tensor], Tensor], inputs: Sequence[Tensor], target: Target, batches: Sequence[int]
) -> float:
    """Σ‖target − y‖² / Σ‖target‖² over the given batches."""
    missed, total = 0.0, 0.0
    for index in batches:
        wanted_TD = target(index, inputs[index])
        missed += float((wanted_TD - carved(inputs[index])).double().square().sum())
        total += float(wanted_TD.double().square().sum())
    return missed / total if total else 0.0


@torch.no_grad()
def align_down(
    carved: Carved,
    inputs: Sequence[Tensor],
    target: Target,
    settings: AlignmentSettings,
) -> Alignment[Carved]:
    """Fit the change of the down columns; keep the penalty that is best on the guard batches, or none.

    Args:
        carved: the layer as it is.
        inputs: its FFN inputs, a batch each.
        target: (batch index, its inputs) → wanted outputs (T, D).
        settings: ridge penalties, relative to the mean diagonal of the features' second moment; share of the batches
            held out; and whether the columns stay where no penalty makes the held-out batches better.
    """
    fitted, held_out = split_validation(len(inputs), settings.validation_share)
    moments = NormalEquations(carved.width, inputs[0].shape[1], device=inputs[0].device)
    for index in fitted:
        blocks, output_TD = carved.run(inputs[index])
        moments.add_blocks(blocks, target(index, inputs[index]) - output_TD)
    before = relative_error(carved, inputs, target, held_out)
    best = Alignment(carved, before, before if settings.validate else float("inf"), None)
    last = float("inf")
    for penalty in sorted(settings.penalties, reverse=True):
        candidate = carved.with_change(moments.solve(penalty))
        error = relative_error(candidate, inputs, target, held_out)
        if error < best.error_after:
            best = Alignment(candidate, before, error, penalty)
        if error > last:
            break  # less penalty fits the tokens at hand ever closer, and the held-out ones ever worse
        last = error
    return best


class AlignmentTarget:
    """local: the dense FFN on the carved model's own inputs. residual: the dense model's residual stream.

    The second also asks a layer to make good what earlier layers got wrong, and costs a dense model beside the carved.
    """

    def __init__(self, kind: str, stream: LayerStream, batches: Sequence[TokenBatch]) -> None:
        """Start a dense stream where one is needed."""
        self._dense = TokenStream(stream, batches) if kind == "residual" else None
        self._wanted: dict[int, Tensor] = {}  # of this layer: computed once, asked for many times
        self._ffn: DenseFFN | None = None
        self._carved: TokenStream | None = None

    def enter(self, layer: StreamLayer, carved: TokenStream) -> None:
        """Go on to a layer that the carved stream has entered and not yet left."""
        if self._dense is not None and not layer.plain_residual:
            raise ConfigError(
                "this family norms or scales an FFN's output before it adds it: no output can be read off the residual "
                "stream",
                where="project.alignment_target=residual",
                do="project.alignment_target=local",
            )
        self._ffn, self._carved, self._wanted = layer.ffn, carved, {}
        if self._dense is not None:
            self._dense.enter(layer)
            self._dense.leave(map(layer.ffn, self._dense.inputs))

    def __call__(self, index: int, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """Wanted output of batch `index`, whose inputs are `x_TD`."""
        if index not in self._wanted:
            self._wanted[index] = self._compute(index, x_TD)
        return self._wanted[index]

    def _compute(self, index: int, x_TD: Tensor) -> Tensor:
        assert self._ffn is not None, "enter a layer first"
        assert self._carved is not None, "enter a layer first"
        if self._dense is None:
            return self._ffn(x_TD)
        mask_BT = self._carved.masks[index]
        return self._dense.hidden[index][mask_BT] - self._carved.hidden[index][mask_BT]
