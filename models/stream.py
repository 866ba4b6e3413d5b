"""A dense model run layer by layer from its shards, one layer in memory at a time.

Many streams of hidden states can pass the same layers side by side (the dense model, the carved one, baselines), each
with its own FFN. Memory is the hidden states plus one layer, whatever the model's size.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from models.checkpoint.reader import ShardReader
from models.families.dense import dense_family
from models.families.fused_reading import read_part
from models.families.shell import DecoderShell
from models.ffn import DenseFFN
from models.source import read_config

# Lengths whose masks and rotations are kept: every layer and stream asks for them again.
_LENGTHS_KEPT = 64


class _CaptureFFN(nn.Module):
    """Stands in for a layer's FFN: keeps the input, adds nothing."""

    x: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        return torch.zeros_like(x)


class StreamLayer:
    """One decoder layer: attention by transformers' own code, FFN by whoever streams."""

    def __init__(self, module: nn.Module, ffn: DenseFFN, arguments: Callable[[int], dict[str, Any]]) -> None:
        """Replace the layer's FFN by one that only shows its input.

        Args:
            module: of transformers, weights in place.
            ffn: the weights of its FFN.
            arguments: tokens of a sequence → what the decoder calls the layer with beside them.
        """
        self.ffn = ffn
        self._capture = _CaptureFFN()
        module.mlp = self._capture
        self._module, self._arguments = module, arguments
        self._norm: nn.Module | None = getattr(module, "post_feedforward_layernorm", None)
        self._multiplier: float = getattr(module, "residual_multiplier", 1.0)

    @property
    def plain_residual(self) -> bool:
        """Whether the layer's output is the residual stream plus the FFN's output, nothing between."""
        return self._norm is None and self._multiplier == 1.0

    @torch.no_grad()
    def attend(self, hidden_BTD: Float[Tensor, "B T D"]) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T D"]]:
        """Residual stream after attention, and the FFN's input; the layer's output is `add(residual, FFN(input))`.

        Right padding needs no mask: under causal attention no real token sees it.
        """
        residual = self._module(hidden_BTD, **self._arguments(hidden_BTD.shape[1]))
        return (residual[0] if isinstance(residual, tuple) else residual), self._capture.x

    @torch.no_grad()
    def add(self, residual: Float[Tensor, "*T D"], ffn_output: Float[Tensor, "*T D"]) -> Float[Tensor, "*T D"]:
        """The layer's output: the residual stream and what an FFN gave, normed or scaled where the family does that."""
        if self._norm is not None:
            ffn_output = self._norm(ffn_output)
        return residual + ffn_output * self._multiplier


class LayerStream:
    """The layers, embedding and head of one checkpoint of a supported dense family."""

    def __init__(self, folder: Path, *, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        """Read the configuration; weights are read when they are needed."""
        source = read_config(folder)
        self.config = AutoConfig.from_pretrained(folder, local_files_only=True)
        self.device, self.dtype = device, dtype
        self._reader, self._family = ShardReader(folder), dense_family(source)
        self._kept = [self._family.kept(layer, source) for layer in range(self.depth)]
        with torch.device("meta"):
            self._skeleton = AutoModelForCausalLM.from_config(self.config, dtype=dtype).eval()
        self._shell = DecoderShell(self._skeleton, device=device, dtype=dtype)
        self._arguments = lru_cache(_LENGTHS_KEPT)(self._layer_arguments)

    def __enter__(self) -> "LayerStream":
        """Keep the shards open."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close the shards."""
        self._reader.close()

    @property
    def depth(self) -> int:
        """L."""
        depth: int = self.config.num_hidden_layers
        return depth

    def embed(self, batches: Sequence[Tensor]) -> list[Tensor]:
        """Hidden states (B, T, D) before the first layer, for token ids (B, T); B and T differ from batch to batch."""
        table_VD = self._reader.tensor(self._family.embedding)
        hidden = []
        for ids_BT in batches:
            # Only the rows in use are cast and moved.
            used, rows_BT = torch.unique(ids_BT.cpu(), return_inverse=True)
            hidden.append(self._shell.embed(rows_BT.to(self.device), table_VD[used].to(self.device, self.dtype)))
        return hidden

    def layers(self) -> Iterator[StreamLayer]:
        """Every decoder layer in order; the one before is freed."""
        for index, module in enumerate(self._skeleton.get_decoder().layers):
            gate_FD, up_FD, down_DF = map(self._tensor, self._family.ffn(index))
            ffn = DenseFFN(gate_FD, up_FD, down_DF, _activation(module.mlp))
            attention = _without_ffn(module)
            attention.load_state_dict(self._attention_weights(index), assign=True)

            def arguments(length: int, index: int = index) -> dict[str, Any]:
                return self._arguments(length)[index]

            yield StreamLayer(attention, ffn, arguments)
            attention.to("meta")

    def head(self) -> Callable[[Float[Tensor, "B T D"]], Float[Tensor, "B T V"]]:
        """Final norm and output embedding, as a function from hidden states to logits."""
        tied = self.config.tie_word_embeddings or self._family.head not in self._reader.names
        output_VD = self._tensor(self._family.embedding if tied else self._family.head)
        self._shell.set_head(self._tensor(self._family.final_norm), output_VD)
        return self._shell.logits

    def _tensor(self, name: str) -> Tensor:
        return read_part(self._reader, name).to(self.device, self.dtype)

    def _attention_weights(self, index: int) -> dict[str, Tensor]:
        prefix = f"model.layers.{index}."
        return {name.removeprefix(prefix): self._tensor(name) for name in self._family.stored(self._kept[index])}

    def _layer_arguments(self, length: int) -> list[dict[str, Any]]:
        like_1TD = torch.zeros(1, length, self.config.hidden_size, device=self.device, dtype=self.dtype)
        return self._shell.layer_arguments(like_1TD)


def _activation(mlp: nn.Module) -> Callable[[Tensor], Tensor]:
    return mlp.get_submodule("activation_fn" if hasattr(mlp, "activation_fn") else "act_fn")


def _without_ffn(module: nn.Module) -> nn.Module:
    module.mlp = nn.Identity()
    return module
