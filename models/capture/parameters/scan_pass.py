"""One forward pass and what its backward passes measured."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.capture.parameters.call import CallFacts
from models.capture.parameters.embedding_norms import HeadPart
from models.capture.parameters.layout import Layout


@dataclass
class Buffers:
    """Sums of squares by device, (B, W) as laid out, and per token (B, T, 2P): activations, then gradients."""

    sums: dict[torch.device, Tensor] = field(default_factory=dict)
    tokens: dict[torch.device, Tensor] = field(default_factory=dict)
    with_gradient: set[int] = field(default_factory=set)  # parameters measured
    # Of a tied embedding: what the output embedding has contributed so far.
    head: HeadPart | None = None


@dataclass(eq=False)
class ScanPass:
    """Facts of a forward pass and the buffers of the backward pass under way.

    The probes in the graph hold it, so that several forward passes before one backward each keep their own.
    """

    facts: CallFacts
    layout: Layout
    names: Sequence[str]
    source: str = ""
    per_token: bool = False
    ids_BT: Tensor | None = None
    used: set[str] = field(default_factory=set)  # modules that have run
    buffers: Buffers = field(default_factory=Buffers)

    def sums_on(self, device: torch.device) -> Tensor:
        """The buffer of a device, made at its first use."""
        if device not in self.buffers.sums:
            self.buffers.sums[device] = self.layout.empty(self.facts.samples, device)
        return self.buffers.sums[device]

    def write_tokens(self, index: int, activation_BT: Tensor | None, gradient_BT: Tensor | None) -> None:
        """Put squares by token in place, where asked for; a module that saw only the last positions fills those."""
        count = len(self.layout.parameters)
        for column, squares_BT in ((index, activation_BT), (count + index, gradient_BT)):
            if not self.per_token or squares_BT is None:
                continue
            device = squares_BT.device
            if device not in self.buffers.tokens:
                shape = (self.facts.samples, self.facts.length, 2 * count)
                self.buffers.tokens[device] = torch.full(shape, torch.nan, device=device)
            self.buffers.tokens[device][:, -squares_BT.shape[1] :, column] = squares_BT

    def take(self) -> Buffers:
        """What was measured; the next backward pass through the same graph begins with empty buffers."""
        taken, self.buffers = self.buffers, Buffers()
        return taken
