"""A dense model run layer by layer from its shards, one layer in memory at a time.

Many streams of hidden states can pass the same layers side by side (the dense model, the carved one, baselines), each
with its own FFN. Memory is the hidden states plus one layer, for a model of any size.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from models.checkpoint.reader import ShardReader
from models.dense import dense_family
from models.experts import read_part
from models.ffn import DenseFFN
from models.loading import explained_loading
from models.source import read_config


class _LayerStandIn(nn.Module):
    """In the place of a decoder layer: passes hidden states on, and keeps the other arguments."""

    hidden: Tensor

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        # Some releases ask the layer which of the masks is its own.
        self.attention_type = getattr(like, "attention_type", None)
        self.arguments: dict[str, Any] = {}

    def forward(self, hidden: Tensor, **arguments: Any) -> Tensor:  # noqa: ANN401 - differs by release
        self.hidden, self.arguments = hidden, arguments
        return hidden


class _FinalNorm(nn.Module):
    """In the place of the decoder, after its layers have run: only the last norm is left."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, inputs_embeds: Tensor, **_arguments: Any) -> BaseModelOutputWithPast:  # noqa: ANN401
        return BaseModelOutputWithPast(last_hidden_state=self.norm(inputs_embeds))


class DecoderSkeleton:
    """Embedding, masks, position encoding and head by transformers' own code, for every family alike.

    Embeddings are scaled as the family scales them, every layer gets its own mask and rotation, and logits are divided
    or capped, with no code for any of it here. Memory: no weights; the caller lends them for each call.
    """

    def __init__(self, skeleton: PreTrainedModel, *, device: torch.device, dtype: torch.dtype) -> None:
        """Build it from a whole model on the meta device."""
        self._model = _without_layers(skeleton.config, dtype).to(device)
        decoder = self._model.get_decoder()
        self._norm, decoder.norm = decoder.norm, nn.Identity()
        self._stand_ins = [_LayerStandIn(layer) for layer in skeleton.get_decoder().layers]
        decoder.layers = nn.ModuleList(self._stand_ins)
        decoder.config.num_hidden_layers = len(self._stand_ins)
        self._decoder = decoder

    @torch.no_grad()
    def embed(self, ids_BT: Int[Tensor, "B T"], rows_UD: Float[Tensor, "U D"]) -> Float[Tensor, "B T D"]:
        """Hidden states before the first layer; `ids_BT` are rows of `rows_UD`."""
        self._decoder.embed_tokens.weight = nn.Parameter(rows_UD, requires_grad=False)
        self._decoder(input_ids=ids_BT, use_cache=False)
        return self._stand_ins[0].hidden

    @torch.no_grad()
    def layer_arguments(self, hidden_1TD: Float[Tensor, "1 T D"]) -> list[dict[str, Any]]:
        """Each layer's arguments other than hidden states; those of one sequence hold for any number."""
        self._decoder(inputs_embeds=hidden_1TD, use_cache=False)
        return [stand_in.arguments for stand_in in self._stand_ins]

    @torch.no_grad()
    def set_head(self, norm_D: Float[Tensor, "D"], output_VD: Float[Tensor, "V D"]) -> None:
        """Lend the weights that `logits` needs."""
        self._norm.load_state_dict({"weight": norm_D}, assign=True)
        self._model.lm_head.weight = nn.Parameter(output_VD, requires_grad=False)

    @torch.no_grad()
    def logits(self, hidden_BTD: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """Final norm and output embedding, scaled or capped as the family does it."""
        base = self._model.base_model_prefix
        setattr(self._model, base, _FinalNorm(self._norm))
        try:
            logits: Tensor = self._model(inputs_embeds=hidden_BTD, use_cache=False).logits
        finally:
            setattr(self._model, base, self._decoder)
        return logits


def _without_layers(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    small = copy.deepcopy(config)
    small.num_hidden_layers, small.vocab_size, small.pad_token_id = 0, 1, None
    model: PreTrainedModel = AutoModelForCausalLM.from_config(small, dtype=dtype)
    return model.eval()


# Lengths whose masks and rotations are kept: every layer and stream asks for them again.
_LENGTHS_KEPT = 64


class _CaptureFFN(nn.Module):
    """In the place of a layer's FFN: keeps the input, adds nothing."""

    x: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        return torch.zeros_like(x)


class StreamLayer:
    """One decoder layer: attention by transformers' own code, FFN by the caller."""

    def __init__(self, module: nn.Module, ffn: DenseFFN, arguments: Callable[[int], dict[str, Any]]) -> None:
        """Replace the layer's FFN by one that only records its input.

        Args:
            module: of transformers, weights in place.
            ffn: the weights of its FFN.
            arguments: length of a sequence → the layer's other arguments.
        """
        self.ffn = ffn
        self._capture = _CaptureFFN()
        module.mlp = self._capture
        self._module, self._arguments = module, arguments
        self._norm: nn.Module | None = getattr(module, "post_feedforward_layernorm", None)
        self._multiplier: float = getattr(module, "residual_multiplier", 1.0)

    @torch.no_grad()
    def attend(self, hidden_BTD: Float[Tensor, "B T D"]) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T D"]]:
        """Residual stream after attention, and the FFN's input; the layer's output is `add(residual, FFN(input))`.

        Right padding needs no mask: under causal attention no real token sees it.
        """
        residual = self._module(hidden_BTD, **self._arguments(hidden_BTD.shape[1]))
        return (residual[0] if isinstance(residual, tuple) else residual), self._capture.x

    @torch.no_grad()
    def add(self, residual: Float[Tensor, "*T D"], ffn_output: Float[Tensor, "*T D"]) -> Float[Tensor, "*T D"]:
        """The layer's output: the residual stream plus an FFN's output, normed or scaled where the family does that."""
        if self._norm is not None:
            ffn_output = self._norm(ffn_output)
        return residual + ffn_output * self._multiplier


class LayerStream:
    """The layers, embedding and head of one checkpoint of a supported dense family."""

    def __init__(self, folder: Path, *, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        """Read the configuration; weights are read when they are needed."""
        source = read_config(folder)
        with explained_loading(folder):
            self.config = AutoConfig.from_pretrained(folder, local_files_only=True)
        self.device, self.dtype = device, dtype
        self._reader, self._family = ShardReader(folder), dense_family(source)
        self._kept = [self._family.kept(layer, source) for layer in range(self.depth)]
        with explained_loading(folder), torch.device("meta"):
            self._skeleton = AutoModelForCausalLM.from_config(self.config, dtype=dtype).eval()
        self._decoder = DecoderSkeleton(self._skeleton, device=device, dtype=dtype)
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
            hidden.append(self._decoder.embed(rows_BT.to(self.device), table_VD[used].to(self.device, self.dtype)))
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
        self._decoder.set_head(self._tensor(self._family.final_norm), output_VD)
        return self._decoder.logits

    def _tensor(self, name: str) -> Tensor:
        return read_part(self._reader, name).to(self.device, self.dtype)

    def _attention_weights(self, index: int) -> dict[str, Tensor]:
        prefix = f"model.layers.{index}."
        return {name.removeprefix(prefix): self._tensor(name) for name in self._family.stored(self._kept[index])}

    def _layer_arguments(self, length: int) -> list[dict[str, Any]]:
        like_1TD = torch.zeros(1, length, self.config.hidden_size, device=self.device, dtype=self.dtype)
        return self._decoder.layer_arguments(like_1TD)


def _activation(mlp: nn.Module) -> Callable[[Tensor], Tensor]:
    return mlp.get_submodule("activation_fn" if hasattr(mlp, "activation_fn") else "act_fn")


def _without_ffn(module: nn.Module) -> nn.Module:
    module.mlp = nn.Identity()
    return module
