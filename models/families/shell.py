"""A dense model without its layers: all that transformers does before, between and after them."""

import copy
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast


class _LayerStandIn(nn.Module):
    """Passes on what it gets, and keeps what the decoder hands a layer beside it."""

    hidden: Tensor

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        # Some releases ask the layer which of the masks is its own.
        self.attention_type = getattr(like, "attention_type", None)
        self.arguments: dict[str, Any] = {}

    def forward(self, hidden: Tensor, **arguments: Any) -> Tensor:  # noqa: ANN401 - whatever its release hands a layer
        self.hidden, self.arguments = hidden, arguments
        return hidden


class _FinalNorm(nn.Module):
    """Stands in for the decoder: all of it but the last norm has already happened."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, inputs_embeds: Tensor, **_arguments: Any) -> BaseModelOutputWithPast:  # noqa: ANN401
        return BaseModelOutputWithPast(last_hidden_state=self.norm(inputs_embeds))


class DecoderShell:
    """Embedding, masks, position encoding and head by transformers' own code, for every family alike.

    Embeddings are scaled as the family scales them, every layer gets its own mask and rotation, and logits are divided
    or capped, without a line about any of it here. Memory: no weights; they are lent for each call.
    """

    def __init__(self, skeleton: PreTrainedModel, *, device: torch.device, dtype: torch.dtype) -> None:
        """Build it beside a whole model on the meta device."""
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
        """What each layer is called with beside its hidden states; those of one sequence serve any number."""
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
