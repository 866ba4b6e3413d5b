"""Which weights of a model are watched."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from models.capture.records import WatchedParameter
from models.errors import ConfigError

# Attention and FFN projections by the names of transformers, fused ones included.
_PROJECTIONS = ("q", "k", "v", "o", "qkv", "gate", "up", "down", "gate_up")
DEFAULT_LINEARS = (*(f"*{name}_proj" for name in _PROJECTIONS), "*c_attn", "*c_proj", "*query_key_value")


@dataclass(frozen=True)
class Target:
    """A watched weight and the module that uses it."""

    parameter: WatchedParameter
    module: nn.Module
    # Of an embedding: the Linear that uses the same weight (tied output embedding).
    head: nn.Linear | None = None


def find_targets(model: nn.Module, patterns: Sequence[str] | None, block_width: int) -> list[Target]:
    """The embedding, where it is asked for, then every Linear asked for, in the model's order.

    Args:
        model: any module; subclasses of nn.Linear count, those of bitsandbytes among them.
        patterns: globs on module names; None for attention and FFN projections and the input embedding.
        block_width: rows or columns of a block.
    Raises:
        ConfigError: nothing matches, a width below 1, or two Linears with one weight.
    """
    if block_width < 1:
        raise ConfigError(f"block_width={block_width} is below 1", where="ParameterTensorScanner", do="block_width=64")
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    embedding = _embedding_target(model, patterns, block_width, linears)
    head = embedding[0].head if embedding else None
    chosen = {
        name: module
        for name, module in linears.items()
        if module is not head and _matches(name, DEFAULT_LINEARS if patterns is None else patterns)
    }
    targets = embedding + [
        Target(
            WatchedParameter(f"{name}.weight", "linear", module.in_features, module.out_features, block_width), module
        )
        for name, module in chosen.items()
    ]
    if not targets:
        raise _nothing_matched(patterns, linears)
    _refuse_shared(chosen)
    return targets


def _embedding_target(
    model: nn.Module, patterns: Sequence[str] | None, block_width: int, linears: dict[str, nn.Linear]
) -> list[Target]:
    module = input_embedding(model)
    name = next((name for name, other in model.named_modules() if other is module), "")
    if module is None or (patterns is not None and not _matches(name, patterns)):
        return []
    if type(module).forward is not nn.Embedding.forward:
        # Gemma scales what it looks up, bitsandbytes' StableEmbedding normalises it: another gradient.
        warnings.warn(f"{name} ({type(module).__name__}) is no plain look-up: its weight is not scanned", stacklevel=4)
        return []
    head = next((linear for linear in linears.values() if _tied(model, linear, module)), None)
    parameter = WatchedParameter(
        f"{name}.weight", "embedding", module.num_embeddings, module.embedding_dim, block_width
    )
    return [Target(parameter, module, head)]


def input_embedding(model: nn.Module) -> nn.Embedding | None:
    """What `model.get_input_embeddings()` names, where there is such a thing."""
    getter = getattr(model, "get_input_embeddings", None)
    module = getter() if getter else None
    return module if isinstance(module, nn.Embedding) else None


def _tied(model: nn.Module, linear: nn.Linear, embedding: nn.Embedding) -> bool:
    if linear.weight is embedding.weight:
        return True
    # Offloading puts a placeholder of its own into every module; only the config still tells.
    placeholders = linear.weight.is_meta and linear.weight.shape == embedding.weight.shape
    output = getattr(model, "get_output_embeddings", lambda: None)()
    config: Any = getattr(model, "config", None)
    return placeholders and linear is output and bool(config and config.get_text_config().tie_word_embeddings)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _refuse_shared(chosen: dict[str, nn.Linear]) -> None:
    owners: dict[int, str] = {}
    for name, module in chosen.items():
        if module.weight.is_meta:
            continue
        first = owners.setdefault(id(module.weight), name)
        if first != name:
            raise ConfigError(
                f"{first} and {name} share one weight; its gradient is the sum of both",
                where="ParameterTensorScanner",
                do="leave one of them out: patterns=[...]",
            )


def _nothing_matched(patterns: Sequence[str] | None, linears: dict[str, nn.Linear]) -> ConfigError:
    asked = "the default patterns" if patterns is None else f"patterns={list(patterns)}"
    kinds = sorted({name.rpartition(".")[2] for name in linears})
    found = f"its Linear layers are called {', '.join(kinds)}" if kinds else "it has no nn.Linear"
    example = f"patterns=['*{kinds[0]}']" if kinds else "scan a model with nn.Linear layers"
    return ConfigError(
        f"no parameter of the model matches {asked}; {found}", where="ParameterTensorScanner", do=example
    )
