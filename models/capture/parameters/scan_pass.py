"""One forward pass and what its backward passes measured."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from models.capture.parameters.call import CallFacts
from models.capture.parameters.embedding_norms import HeadPart
from models.capture.parameters.inputs import InputSquares
from models.capture.parameters.layout import Layout


@dataclass
class Squares:
    """Sums of squares by parameter, each on the device it was measured on."""

    activation: dict[int, Tensor] = field(default_factory=dict)  # (B, input blocks); of a look-up (B, 1)
    in_gradient: dict[int, Tensor] = field(default_factory=dict)  # (B, input blocks)
    out_gradient: dict[int, Tensor] = field(default_factory=dict)  # (B, output blocks)
    # By position, where asked for: (B, T), or the last positions only.
    token_activation: dict[int, Tensor] = field(default_factory=dict)
    token_gradient: dict[int, Tensor] = field(default_factory=dict)

    def groups(self) -> list[dict[int, Tensor]]:
        """All of them, in order."""
        return [self.activation, self.in_gradient, self.out_gradient, self.token_activation, self.token_gradient]


@dataclass(eq=False)
class ScanPass:
    """Facts of a forward pass and the squares of the backward pass under way.

    The probes in the graph hold it, so that several forward passes before one backward each keep their own.
    """

    facts: CallFacts
    layout: Layout
    names: Sequence[str]
    source: str = ""
    per_token: bool = False
    ids_BT: Tensor | None = None
    used: set[str] = field(default_factory=set)  # modules that have run
    squares: Squares = field(default_factory=Squares)
    head: HeadPart | None = None  # what a tied output embedding has contributed to the backward pass under way
    last_input: InputSquares | None = None  # of the module measured last

    def take(self) -> Squares:
        """What was measured; the next backward pass through the same graph begins anew."""
        taken, self.squares, self.head, self.last_input = self.squares, Squares(), None, None
        return taken
