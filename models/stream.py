"""Run a dense model layer by layer from its shards, one layer in memory at a time.

Several streams of hidden states (dense model, carved model, baselines) can pass the same layer, each with its own FFN.
Memory: the hidden states and one layer.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast

from models.checkpoint.shards import ShardReader
from models.ffn import DenseFFN
from models.loading import explained_loading


class _LayerStandIn(nn.Module):
    """Replaces a decoder layer: returns the hidden states and keeps the other arguments."""

    hidden: Tensor

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        # Some releases read from the layer which mask it needs.
        self.attention_type = getattr(like, "attention_type", None)
        self.arguments: dict[str, Any] = {}

    def forward(self, hidden: Tensor, **arguments: Any) -> Tensor:  # noqa: ANN401 - differs by release
        self.hidden, self.arguments = hidden, arguments
        return hidden


class _FinalNorm(nn.Module):
    """Replaces the decoder after its layers have run: applies only the final norm."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, inputs_embeds: Tensor, **_arguments: Any) -> BaseModelOutputWithPast:  # noqa: ANN401
        return BaseModelOutputWithPast(last_hidden_state=self.norm(inputs_embeds))


class _CaptureFFN(nn.Module):
    """Replaces a layer's FFN: keeps the input and returns zeros."""

    x: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        return torch.zeros_like(x)


class StreamLayer:
    """One decoder layer: attention by transformers' own code, FFN by the caller."""

    def __init__(self, module: nn.Module, ffn: DenseFFN, arguments: Callable[[int], dict[str, Any]]) -> None:
        """Replace the FFN of transformers' `module` by one that records its input.

        `arguments` maps a sequence length to the module's arguments other than hidden states.
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

        Right padding needs no mask: in causal attention no real token attends to it.
        """
        residual = self._module(hidden_BTD, **self._arguments(hidden_BTD.shape[1]))
        return (residual[0] if isinstance(residual, tuple) else residual), self._capture.x

    @torch.no_grad()
    def add(self, residual: Float[Tensor, "*T D"], ffn_output: Float[Tensor, "*T D"]) -> Float[Tensor, "*T D"]:
        """The layer's output: residual stream plus FFN output, which some families normalise or scale first."""
        if self._norm is not None:
            ffn_output = self._norm(ffn_output)
        return residual + ffn_output * self._multiplier


# Sequence lengths whose masks and rotations are cached, since every layer and stream needs them.
_LENGTHS_KEPT = 64


class LayerStream(AbstractContextManager["LayerStream"]):
    """The layers, embedding and head of one checkpoint of a supported dense family.

    Embedding, masks, position encoding and head are computed by transformers' own code, in a model without layers that
    receives its weights for each call. So the families' scaled embeddings, masks and rotations per layer, and divided
    or capped logits need no code here.
    """

    def __init__(self, folder: Path, *, device: torch.device) -> None:
        """Read the configuration; weights are read when they are needed, and computed with in fp32."""
        self.device = device
        self._reader = ShardReader(folder)
        self._family = self._reader.family
        with explained_loading(folder), torch.device("meta"):
            self.config = AutoConfig.from_pretrained(folder, local_files_only=True)
            self._skeleton = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32).eval()
        small = copy.deepcopy(self.config)
        small.num_hidden_layers, small.vocab_size, small.pad_token_id = 0, 1, None
        self._model = AutoModelForCausalLM.from_config(small, dtype=torch.float32).eval().to(device)
        self._decoder = self._model.get_decoder()
        self._norm, self._decoder.norm = self._decoder.norm, nn.Identity()
        self._stand_ins = [_LayerStandIn(layer) for layer in self._skeleton.get_decoder().layers]
        self.depth = len(self._stand_ins)  # L
        self._decoder.layers = nn.ModuleList(self._stand_ins)
        self._decoder.config.num_hidden_layers = self.depth
        self._arguments_of_length = lru_cache(_LENGTHS_KEPT)(self._layer_arguments)

    def __exit__(self, *_error: object) -> None:
        self._reader.close()

    @torch.no_grad()
    def embed(self, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """Hidden states (B, T, D) before the first layer, for token ids (B, T); B and T differ from batch to batch."""
        table_VD = self._reader.tensor(self._family.embedding)
        for ids_BT in batches:
            # Only the rows in use are cast and moved.
            used, rows_BT = torch.unique(ids_BT.cpu(), return_inverse=True)
            rows_UD = table_VD[used].to(self.device, torch.float32)
            self._decoder.embed_tokens.weight = nn.Parameter(rows_UD, requires_grad=False)
            self._decoder(input_ids=rows_BT.to(self.device), use_cache=False)
            yield self._stand_ins[0].hidden

    def layers(self) -> Iterator[StreamLayer]:
        """Yield every decoder layer in order and free the previous one."""
        for index, module in enumerate(self._skeleton.get_decoder().layers):
            act = module.mlp.get_submodule("activation_fn" if hasattr(module.mlp, "activation_fn") else "act_fn")
            module.mlp = nn.Identity()
            prefix, names = f"model.layers.{index}.", self._family.kept(index, self._reader.config)
            attention = {name.removeprefix(prefix): self._tensor(name) for name in self._family.stored(names)}
            module.load_state_dict(attention, assign=True)
            # Only the caller holds the FFN, and may delete it from the layer.
            yield StreamLayer(module, self._ffn(index, act), partial(self._arguments, index))
            module.to("meta")

    def head(self) -> Callable[[Float[Tensor, "B T D"]], Float[Tensor, "B T V"]]:
        """Final norm and output embedding, as a function from hidden states to logits."""
        stored = self._family.head in self._reader.names
        output_VD = self._tensor(self._family.head if stored else self._family.embedding)
        self._norm.load_state_dict({"weight": self._tensor(self._family.final_norm)}, assign=True)
        self._model.lm_head.weight = nn.Parameter(output_VD, requires_grad=False)
        return self._logits

    @torch.no_grad()
    def _logits(self, hidden_BTD: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        base = self._model.base_model_prefix
        setattr(self._model, base, _FinalNorm(self._norm))
        try:
            logits: Tensor = self._model(inputs_embeds=hidden_BTD, use_cache=False).logits
        finally:
            setattr(self._model, base, self._decoder)
        return logits

    def _ffn(self, index: int, act: Callable[[Tensor], Tensor]) -> DenseFFN:
        gate_FD, up_FD, down_DF = map(self._tensor, self._family.ffn(index))
        return DenseFFN(gate_FD, up_FD, down_DF, act)

    def _tensor(self, name: str) -> Tensor:
        return self._reader.tensor(name).to(self.device, torch.float32)

    def _arguments(self, index: int, length: int) -> dict[str, Any]:
        return self._arguments_of_length(length)[index]

    @torch.no_grad()
    def _layer_arguments(self, length: int) -> list[dict[str, Any]]:
        """Each layer's arguments other than hidden states; those for one sequence serve any batch size."""
        like_1TD = torch.zeros(1, length, self.config.hidden_size, device=self.device)
        self._decoder(inputs_embeds=like_1TD, use_cache=False)
        return [stand_in.arguments for stand_in in self._stand_ins]
