"""The arguments of a model's forward call: samples, positions, padding, labels."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from instruments.errors import ConfigError
from instruments.parameter_scan.targets import refusal

IGNORED = -100  # the label that losses ignore


@dataclass(frozen=True, eq=False)
class CallFacts:
    """Facts of a forward call: B samples of T positions; of an encoder-decoder, those of the encoder."""

    samples: int
    length: int
    mask_BT: Tensor | None  # True at tokens, False at padding; None: all are tokens
    supervised_B: Tensor | None  # number of labels in the loss, if it shifts them by one; None: unknown
    labelled_B: Tensor | None = None  # the same if it does not
    ids_BT: Tensor | None = None  # input_ids
    decoder: "CallFacts | None" = None  # of an encoder-decoder: the other sequences of the same samples

    def side(self, tensor: Tensor, name: str) -> "CallFacts | None":
        """The facts, or the decoder's, that apply to a module's input; None if its shape and name do not tell."""
        if self.decoder is None:
            return self
        pooled = tensor.ndim == 2 and len(tensor) == self.samples
        positions = tensor.shape[1] if tensor.ndim == 3 else len(tensor) // self.samples
        if self.length == self.decoder.length:
            same = self.mask_BT is None and self.decoder.mask_BT is None
            return self if pooled or same or "encoder" in name.split(".") else None
        return self if pooled else {self.length: self, self.decoder.length: self.decoder}.get(positions)

    def has_tokens(self, side: "CallFacts") -> bool:
        """Whether values per token can be recorded: a record has rows for the encoder's tokens only."""
        return self.decoder is None or (side is self and self.length != self.decoder.length)

    def split(self, tensor: Tensor, name: str) -> Tensor:
        """A module's input as (B, T, N), from (B, T, N), (B·T, N) or one row per sample (B, N); else ConfigError."""
        if tensor.ndim == 3 and tensor.shape[0] == self.samples and tensor.shape[1] <= self.length:
            return tensor
        if tensor.ndim == 2 and tensor.shape[0] == self.samples * self.length:
            return tensor.view(self.samples, self.length, -1)
        if tensor.ndim == 2 and tensor.shape[0] == self.samples:
            return tensor.unsqueeze(1)
        raise self.inseparable(name, f"a tensor of shape {tuple(tensor.shape)}")

    def inseparable(self, name: str, given: str) -> ConfigError:
        """The error for a module whose input cannot be split by samples."""
        what = f"{name} was given {given}; expected {self.samples} samples of {self.length} positions"
        return refusal(what)


def bind_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name; a wrapper that takes any arguments has the names of the model inside."""
    return dict(zip(_positional_names(model), args, strict=False)) | dict(kwargs)


def replace_argument(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str, value: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with another value of `name`, which is one of them."""
    if name in kwargs:
        return args, {**kwargs, name: value}
    place = _positional_names(model).index(name)
    return (*args[:place], value, *args[place + 1 :]), dict(kwargs)


def _positional_names(model: nn.Module) -> list[str]:
    """Names of the arguments that forward takes by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind in kinds]
    inside = list(model.children())
    return names if names or len(inside) != 1 else _positional_names(inside[0])


_DECODER_ARGUMENTS = ("decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask")


def read_call(arguments: Mapping[str, Any], *, encoder_decoder: bool = False) -> CallFacts:
    """Sizes, padding and number of supervised tokens, from the model's arguments.

    Raises ConfigError: neither input_ids nor inputs_embeds, or an attention mask of another shape.
    """
    given = (arguments.get(name) for name in ("input_ids", "inputs_embeds"))
    inputs = next((value for value in given if isinstance(value, Tensor)), None)
    if inputs is None:
        what = f"the model was called with {', '.join(sorted(arguments)) or 'nothing'}; its samples are unknown"
        raise refusal(what, "call the scanned model with input_ids=... or inputs_embeds=...")
    samples, length = inputs.shape[:2]
    ids_BT = None if inputs.is_floating_point() else inputs
    mask_BT, decoder = _padding_mask(arguments, "attention_mask", samples, length), None
    if encoder_decoder or any(arguments.get(name) is not None for name in _DECODER_ARGUMENTS):
        own = [arguments.get(name) for name in (*_DECODER_ARGUMENTS[:2], "labels")]
        own_length = next((value.shape[1] for value in own if isinstance(value, Tensor) and value.ndim > 1), length)
        own_mask_BT = _padding_mask(arguments, _DECODER_ARGUMENTS[2], samples, own_length)
        decoder = CallFacts(samples, own_length, own_mask_BT, None)
        mask_BT = None if mask_BT is not None and mask_BT.all() else mask_BT
    supervised_B, labelled_B = _supervised(arguments, samples)
    return CallFacts(samples, length, mask_BT, supervised_B, labelled_B, ids_BT, decoder)


def _padding_mask(arguments: Mapping[str, Any], name: str, samples: int, length: int) -> Tensor | None:
    mask = arguments.get(name)
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[0] != samples or mask.shape[1] < length:
        found = f"of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        what = f"{name} is {found}; the scanner reads padding from a mask of shape {(samples, length)}"
        raise refusal(what, f"pass the tokenizer's {name}, or none for samples without padding")
    # With a cache the mask also covers earlier positions.
    return mask[:, -length:] != 0


def _supervised(arguments: Mapping[str, Any], samples: int) -> tuple[Tensor | None, Tensor | None]:
    """Labels in the loss, per sample: without each sample's first, which a causal model's loss shifts away; and all."""
    shifted = arguments.get("shift_labels")
    labels = arguments.get("labels") if shifted is None else shifted
    if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.shape[0] != samples:
        return None, None
    used_BT = labels != IGNORED
    counts_B = used_BT.sum(1, dtype=torch.float32)
    return (used_BT[:, 1:].sum(1, dtype=torch.float32) if shifted is None else counts_B), counts_B
