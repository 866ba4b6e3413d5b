"""One forward pass and what its backward passes measured."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from instruments.errors import ConfigError
from instruments.parameter_scan.inputs import HeadPart, InputSquares
from instruments.parameter_scan.targets import WatchedParameter

IGNORED = -100  # the label that losses leave out


@dataclass(frozen=True, eq=False)
class CallFacts:
    """Of B samples of T positions."""

    samples: int
    length: int
    mask_BT: Tensor | None  # True at tokens, False at padding; None: all are tokens
    supervised_B: Tensor | None  # labels that reach the loss; None: unknown


def bind_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name."""
    if not args:
        return dict(kwargs)
    return dict(inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments)


def read_call(arguments: Mapping[str, Any]) -> CallFacts:
    """Sizes, padding and supervised tokens from the model's own arguments.

    Raises:
        ConfigError: neither input_ids nor inputs_embeds, or an attention mask of another shape.
    """
    inputs = next((arguments[name] for name in ("input_ids", "inputs_embeds") if _given(arguments, name)), None)
    if inputs is None:
        raise ConfigError(
            f"the model was called with {', '.join(sorted(arguments)) or 'nothing'}; its samples cannot be told",
            where="ParameterTensorScanner",
            do="call the scanned model with input_ids=... or inputs_embeds=...",
        )
    samples, length = inputs.shape[:2]
    return CallFacts(samples, length, _padding_mask(arguments, samples, length), _supervised(arguments, samples))


def _given(arguments: Mapping[str, Any], name: str) -> bool:
    return isinstance(arguments.get(name), Tensor)


def _padding_mask(arguments: Mapping[str, Any], samples: int, length: int) -> Tensor | None:
    mask = arguments.get("attention_mask")
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[0] != samples or mask.shape[1] < length:
        found = f"of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise ConfigError(
            f"attention_mask is {found}; the scanner reads padding from a mask of shape {(samples, length)}",
            where="ParameterTensorScanner",
            do="pass the tokenizer's attention_mask, or none for samples without padding",
        )
    # With a cache the mask also covers what was read before.
    return mask[:, -length:] != 0


def _supervised(arguments: Mapping[str, Any], samples: int) -> Tensor | None:
    """Labels that count: a causal model's loss moves them by one, so the first of a sample is never used."""
    labels = arguments.get("shift_labels")
    if labels is None and _given(arguments, "labels"):
        labels = arguments["labels"][..., 1:]
    if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.shape[0] != samples:
        return None
    return (labels != IGNORED).sum(1, dtype=torch.float32)


@dataclass(frozen=True)
class Layout:
    """Blocks of all parameters one after the other, and which parameter each belongs to."""

    parameters: Sequence[WatchedParameter]
    inputs: Tensor  # (I,) parameter of each input block
    outputs: Tensor  # (O,) parameter of each output block
    read: Tensor  # (I + embeddings,) parameter of each block of an activation: a look-up has one

    @classmethod
    def of(cls, parameters: Sequence[WatchedParameter]) -> "Layout":
        """From the parameter table."""
        order = torch.arange(len(parameters))
        inputs = torch.tensor([parameter.in_blocks for parameter in parameters])
        outputs = torch.tensor([parameter.out_blocks for parameter in parameters])
        read = inputs.clamp(min=1)
        return cls(parameters, *(order.repeat_interleave(counts) for counts in (inputs, outputs, read)))

    def join(self, pieces: Mapping[int, Tensor], owners: Tensor, samples: int) -> Float[Tensor, "B n"]:
        """Blocks of every parameter in order, NaN for one that was not measured."""
        counts = owners.bincount(minlength=len(self.parameters)).tolist()
        return torch.cat(
            [
                pieces[index] if index in pieces else torch.full((samples, count), torch.nan)
                for index, count in enumerate(counts)
            ],
            dim=1,
        )

    def totals(self, squares_Bn: Float[Tensor, "B n"], owners: Tensor) -> Float[Tensor, "B P"]:
        """Sum of every parameter's blocks."""
        return squares_Bn.new_zeros(len(squares_Bn), len(self.parameters)).index_add_(1, owners, squares_Bn)


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
