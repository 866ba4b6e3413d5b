"""Which weights of a model are watched, and the record of what was measured."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import ceil
from typing import Any

from torch import Tensor, nn

from instruments.errors import ConfigError


@dataclass(frozen=True)
class WatchedParameter:
    """One watched weight, (out_features, in_features), and how its blocks are cut.

    Input block i holds columns i·width to (i+1)·width of the weight, output block o those rows; the last may be
    narrower. An embedding (V, D) looks rows up: its inputs are not cut, its output blocks are blocks of D.
    """

    name: str  # of the weight: model.layers.0.self_attn.q_proj.weight
    kind: str  # linear or embedding
    in_features: int
    out_features: int
    block_width: int

    @property
    def in_blocks(self) -> int:
        """Number of input blocks."""
        return 0 if self.kind == "embedding" else ceil(self.in_features / self.block_width)

    @property
    def out_blocks(self) -> int:
        """Number of output blocks."""
        return ceil(self.out_features / self.block_width)


@dataclass(frozen=True)
class ScannedSequence:
    """One sample."""

    name: str
    tokens: int
    source: str = ""


@dataclass(frozen=True)
class ScanRecord:
    """L2 norms of B samples for P parameters, float32 on the CPU.

    Columns of (B, P) follow the parameter table; (B, I) and (B, O) hold the input and output blocks of all parameters
    one after the other. NaN where nothing was measured (a forward-only pass has no gradient).
    """

    sequences: Sequence[ScannedSequence]
    activation_BP: Tensor  # ‖X‖ of the direct input over the sample's tokens; embedding: of the rows looked up
    gradient_BP: Tensor  # ‖∂loss/∂W‖
    in_activation_BI: Tensor  # ‖X[:, block]‖
    in_gradient_BI: Tensor  # ‖∂loss/∂W[:, block]‖
    out_gradient_BO: Tensor  # ‖∂loss/∂W[block, :]‖
    # Where asked for, one (T, P) tensor per sample, T its tokens: ‖x_t‖, and ‖x_t‖·‖δ_t‖, the norm of what position t
    # contributes to the weight's gradient. That is not the gradient of token t's own loss.
    token_activation: Sequence[Tensor] | None = None
    token_gradient: Sequence[Tensor] | None = None


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

    Subclasses of nn.Linear count, those of bitsandbytes among them. Without patterns: attention and FFN projections and
    the input embedding. Raises ConfigError: nothing matches, a width below 1, or two Linears with one weight.
    """
    if block_width < 1:
        raise ConfigError(f"block_width={block_width} is below 1", where="ParameterTensorScanner", do="block_width=64")
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    embedding = _embedding_target(model, patterns, block_width, linears)
    globs = DEFAULT_LINEARS if patterns is None else patterns
    chosen = {
        name: module
        for name, module in linears.items()
        if _matches(name, globs) and (embedding is None or module is not embedding.head)
    }
    targets = [embedding] if embedding is not None else []
    for name, module in chosen.items():
        sizes = module.in_features, module.out_features, block_width
        targets.append(Target(WatchedParameter(f"{name}.weight", "linear", *sizes), module))
    if not targets:
        raise _nothing_matched(patterns, linears)
    _refuse_shared(chosen)
    return targets


def _embedding_target(
    model: nn.Module, patterns: Sequence[str] | None, block_width: int, linears: dict[str, nn.Linear]
) -> Target | None:
    module = input_embedding(model)
    name = next((name for name, other in model.named_modules() if other is module), "")
    if module is None or (patterns is not None and not _matches(name, patterns)):
        return None
    if type(module).forward is not nn.Embedding.forward:
        # Gemma scales what it looks up, bitsandbytes' StableEmbedding normalises it: another gradient.
        warnings.warn(f"{name} ({type(module).__name__}) is no plain look-up: its weight is not scanned", stacklevel=4)
        return None
    head = next((linear for linear in linears.values() if _tied(model, linear, module)), None)
    sizes = module.num_embeddings, module.embedding_dim, block_width
    return Target(WatchedParameter(f"{name}.weight", "embedding", *sizes), module, head)


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
        first = owners.setdefault(id(module.weight), name)
        if first != name and not module.weight.is_meta:
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
