"""A decoder of a family that no code knows: registered with transformers, and nothing else of it is written anywhere.

Attention and FFN read the same normalised input; their outputs are normalised, scaled and added. The FFN's matrices are
w1 (gate), w3 (up) and w2 (down), its activation is a function, and the list of layers is `trunk.blocks`.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

MODEL_TYPE = "next_month"


class NextMonthConfig(PretrainedConfig):
    model_type = MODEL_TYPE
    vocab_size: int = 32000
    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    head_dim: int = 128
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = False
    attention_scale: float = 0.3
    ffn_scale: float = 0.7
    passes: int = 1  # through all layers


class Attention(nn.Module):
    def __init__(self, config: NextMonthConfig, index: int) -> None:
        super().__init__()
        self.index, self.heads, self.size = index, config.num_attention_heads, config.head_dim
        self.qkv = nn.Linear(config.hidden_size, 3 * self.heads * self.size, bias=False)
        self.out = nn.Linear(self.heads * self.size, config.hidden_size, bias=False)
        self.distance = nn.Parameter(torch.zeros(self.heads))

    def forward(self, x: Tensor, mask: Tensor | None, position_ids: Tensor, cache: Cache | None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.update(k, v, self.index)
        away = position_ids[:, :, None] - torch.arange(k.shape[2])[None, None]
        weights = q @ k.transpose(2, 3) * self.size**-0.5 - self.distance[:, None, None].exp() * 0.1 * away[:, None]
        mask = torch.ones(length, length, dtype=torch.bool).tril() if mask is None else mask
        weights = weights.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else weights + mask
        mixed = weights.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class GatedUnit(nn.Module):
    def __init__(self, config: NextMonthConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: NextMonthConfig, index: int) -> None:
        super().__init__()
        self.mixer, self.unit = Attention(config, index), GatedUnit(config)
        self.norm_in = nn.LayerNorm(config.hidden_size)
        self.norm_mixer, self.norm_unit = nn.RMSNorm(config.hidden_size), nn.RMSNorm(config.hidden_size)
        self.scales = config.attention_scale, config.ffn_scale

    def forward(self, x: Tensor, mask: Tensor | None, position_ids: Tensor, cache: Cache | None = None) -> Tensor:
        read = self.norm_in(x)
        mixed = self.norm_mixer(self.mixer(read, mask, position_ids, cache))
        return x + self.scales[0] * mixed + self.scales[1] * self.norm_unit(self.unit(read))


class NextMonthPreTrainedModel(PreTrainedModel):
    config_class = NextMonthConfig
    base_model_prefix = "trunk"
    _no_split_modules = ("Block",)


class NextMonthModel(NextMonthPreTrainedModel):
    def __init__(self, config: NextMonthConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.num_hidden_layers))
        self.last_norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.tokens = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        x = self.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        seen = cache.get_seq_length() if cache is not None else 0
        if position_ids is None:
            position_ids = torch.arange(seen, seen + x.shape[1], device=x.device)[None]
        mask = create_causal_mask(self.config, inputs_embeds=x, attention_mask=attention_mask, cache=cache)
        for block in [*self.blocks] * self.config.passes:
            x = block(x, mask, position_ids, cache)
        return BaseModelOutputWithPast(last_hidden_state=self.last_norm(x), cache=cache)


class NextMonthForCausalLM(NextMonthPreTrainedModel, GenerationMixin):
    _tied_weights_keys: ClassVar = {"lm_head.weight": "trunk.tokens.weight"}

    def __init__(self, config: NextMonthConfig) -> None:
        super().__init__(config)
        self.trunk = NextMonthModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> CausalLMOutputWithPast:
        kwargs.pop("logits_to_keep", None)
        found = self.trunk(input_ids, **kwargs)
        logits = self.lm_head(found.last_hidden_state)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, cache=found.cache)


def register() -> None:
    """Make the family known to transformers' automatic classes."""
    AutoConfig.register(MODEL_TYPE, NextMonthConfig, exist_ok=True)
    AutoModel.register(NextMonthConfig, NextMonthModel, exist_ok=True)
    AutoModelForCausalLM.register(NextMonthConfig, NextMonthForCausalLM, exist_ok=True)
