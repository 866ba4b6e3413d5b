"""What a call of the model says about its samples."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.errors import ConfigError

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
