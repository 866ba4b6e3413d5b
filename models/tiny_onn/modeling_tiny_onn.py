"""TinyONN: a dense family's decoder, by transformers' own code, with sparse FFNs.

This file is copied into the checkpoint's folder: it needs only torch and transformers, 4.57 or later.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, MoeCausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple

from .configuration_tiny_onn import TinyONNConfig
from .sparse_ffn import TinyONNExperts, TinyONNRouter, TinyONNSparseFFN, find_activation

try:
    # Does not overwrite parameters that a checkpoint has filled.
    from transformers import initialization as init
except ImportError:  # transformers 4
    from torch.nn import init


class TinyONNPreTrainedModel(PreTrainedModel):  # type: ignore[misc]  # transformers is not typed
    """A dense family's decoder with sparse FFNs. `_dense` is the family's own model, which shares all modules."""

    config_class = TinyONNConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _skip_keys_device_placement = ("cache", "past_key_values")

    def __init__(self, config: TinyONNConfig) -> None:
        """Build the dense model and replace its FFNs by sparse ones."""
        attention = config._attn_implementation
        if attention is None and getattr(config.dense, "attn_logit_softcapping", None):
            # transformers 4 would choose sdpa, which ignores the cap.
            attention = "eager"
        super().__init__(config)
        if attention is not None:
            config.dense._attn_implementation = attention
        # Else a wrapper builds each part in the number format that its configuration names.
        for part in (config.dense, *(getattr(config.dense, key, None) for key in config.dense.sub_configs)):
            if part is not None:
                part.dtype = torch.get_default_dtype()
        dense = self._dense_class(config)(config.dense)
        self.base_model_prefix = dense.base_model_prefix or self.base_model_prefix  # wrappers of transformers 4 say ""
        config._attn_implementation_internal = config.dense._attn_implementation
        self._no_split_modules = dense._no_split_modules
        self._tied_weights_keys = dense._tied_weights_keys
        self._is_stateful = dense._is_stateful
        for name, module in dense.named_children():
            self.add_module(name, module)
        pooled, path, place = config.topology == "global_pool", config.ffn["module"], config.ffn["activation"]
        if pooled:
            self.experts = TinyONNExperts(config, find_activation(place, self._layers()[0].get_submodule(path)))
        for layer in self._sparse_layers():
            activation = find_activation(place, layer.get_submodule(path))
            parent, _, name = path.rpartition(".")
            sparse = TinyONNSparseFFN(config, activation, self._modules if pooled else None)
            setattr(layer.get_submodule(parent), name, sparse)
        # The dense model shares this model's modules, also after one is replaced. It is no submodule itself, so it is
        # neither saved nor counted.
        dense._modules = self._modules
        object.__setattr__(self, "_dense", dense)
        # transformers 5.24 has renamed the argument; a forward may leave all but a few to its decoder.
        known = (*inspect.signature(dense.forward).parameters, *BaseModelOutputWithPast.__dataclass_fields__)
        self._cache_name = next(name for name in known if name in {"cache", "past_key_values"})
        self.post_init()
        # After post_init, which in transformers 4 refuses the name of a buffer.
        kept: set[str] = set(self._keep_in_fp32_modules_strict or ())  # type: ignore[has-type]
        self._keep_in_fp32_modules_strict = kept | {"e_score_correction_bias"}

    @classmethod
    def _dense_class(cls, config: TinyONNConfig) -> Any:  # noqa: ANN401 - a class of any family
        return cls._family[type(config.dense)]

    def _layers(self) -> nn.ModuleList:
        """The decoder layers, which TinyONNModel has without the name of the base model."""
        name = self.config.ffn["layers"]
        layers: nn.ModuleList
        try:
            layers = self.get_submodule(name)
        except AttributeError:
            layers = self.get_submodule(name.partition(".")[2])
        return layers

    def _sparse_layers(self) -> list[Any]:
        return [layer for index, layer in enumerate(self._layers()) if index not in self.config.dense_layers]

    def _sparse_ffns(self) -> list[TinyONNSparseFFN]:
        return [layer.get_submodule(self.config.ffn["module"]) for layer in self._sparse_layers()]

    def initialize_weights(self) -> None:
        """Initialise parameters that no checkpoint has filled."""
        # First routers and experts, which the decoder's own rules would skip.
        for module in self.modules():
            if isinstance(module, TinyONNRouter | TinyONNExperts):
                self._initialize_weights(module)
        # Some models fill their layers' buffers, which transformers leaves to the outermost class.
        for module in self.modules():
            if isinstance(module, PreTrainedModel) and module is not self:
                module._init_weights(module)
        super().initialize_weights()

    def _init_weights(self, module: nn.Module) -> None:
        if not isinstance(module, TinyONNRouter | TinyONNExperts):
            # A family also sets buffers that no checkpoint holds, such as Gemma's scale of embeddings.
            self._dense._init_weights(module)
            return
        for parameter in module.parameters(recurse=False):
            init.normal_(parameter, std=getattr(self.config, "initializer_range", None) or 0.02)
        for buffer in module.buffers(recurse=False):
            init.zeros_(buffer)

    def _decode(self, cache: Any, **inputs: Any) -> Any:  # noqa: ANN401 - as the dense family takes and returns them
        """Run the dense model with this model's modules."""
        if cache is not None:
            inputs[self._cache_name] = cache
        if getattr(self, "_is_replica", False):  # nn.DataParallel copies modules, but not what attributes refer to
            dense = copy(self._dense)
            dense._modules = self._modules
            object.__setattr__(self, "_dense", dense)
            for ffn in self._sparse_ffns() if self.config.topology == "global_pool" else ():
                ffn._pool = self._modules
        return self._dense(**inputs)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # transformers 5 looks for its decorator in this file, but it is used in sparse_ffn.py.
        return True


class TinyONNModel(TinyONNPreTrainedModel):
    """The decoder without the output head, for AutoModel and vLLM."""

    _family = MODEL_MAPPING

    # vLLM looks for these parameter names.
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,  # noqa: ANN401 - a cache of transformers
        inputs_embeds: Tensor | None = None,
        past_key_values: Any = None,  # noqa: ANN401 - the same, before transformers 5.24
        **kwargs: Any,  # noqa: ANN401 - as the family's decoder takes them
    ) -> BaseModelOutputWithPast:
        """``(B, S, D)`` hidden states after the last layer; the arguments are those of the family's decoder."""
        outputs: BaseModelOutputWithPast = self._decode(
            past_key_values if cache is None else cache,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        return outputs


class TinyONNForCausalLM(TinyONNPreTrainedModel, GenerationMixin):  # type: ignore[misc]  # transformers is not typed
    """A causal language model of any dense family, with experts."""

    _family = MODEL_FOR_CAUSAL_LM_MAPPING

    @classmethod
    def _dense_class(cls, config: TinyONNConfig) -> Any:  # noqa: ANN401 - a class of any family
        # A wrapper's own class, which also sees images; a family registered from outside has no name in transformers.
        return getattr(transformers, config.dense_class or "", None) or super()._dense_class(config)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:  # noqa: ANN401 - of transformers
        """As in transformers; some families' loss reads the size from the dense model."""
        embeddings: nn.Embedding = super().resize_token_embeddings(*args, **kwargs)
        self._dense.vocab_size = self.vocab_size
        return embeddings

    def _supports_default_dynamic_cache(self) -> bool:  # transformers 4.57 asks the name of this class
        return bool(type(self._dense)._supports_default_dynamic_cache())

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,  # noqa: ANN401 - a cache of transformers
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: Any = None,  # noqa: ANN401 - the cache, before transformers 5.24
        **kwargs: Any,  # noqa: ANN401 - as the dense family takes them
    ) -> MoeCausalLMOutputWithPast:
        """Next-token logits; arguments and outputs are the dense family's.

        `output_router_logits` (None: as in the configuration) adds each layer's ``(T, E)`` router logits and the load
        balancing loss to the outputs, and that loss to the loss.
        """
        wanted = self.config.output_router_logits if output_router_logits is None else output_router_logits
        with self._watch_routers(enabled=wanted) as routed:
            outputs = self._decode(
                past_key_values if cache is None else cache,
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
                labels=labels,
                use_cache=use_cache,
                logits_to_keep=logits_to_keep,
                **kwargs,
            )
        known = MoeCausalLMOutputWithPast.__dataclass_fields__  # wrappers also return states of images
        described = MoeCausalLMOutputWithPast(**{key: value for key, value in outputs.items() if key in known})
        if wanted:
            described.router_logits = tuple(logits_TE for logits_TE, _, _ in routed)
            described.aux_loss = self._aux_loss(routed, attention_mask)
            if described.loss is not None:
                described.loss = described.loss + self.config.router_aux_loss_coef * described.aux_loss.to(
                    described.loss.device
                )
        return described

    def _aux_loss(self, routed: list[tuple[Tensor, Tensor, Tensor]], attention_mask: Tensor | None) -> Tensor:
        router = self._sparse_ffns()[0].gate
        if torch.is_grad_enabled() and router.weight.requires_grad and not routed[0][0].requires_grad:
            raise ValueError(
                "reentrant gradient checkpointing hides the routers from the load balancing loss; pass "
                'gradient_checkpointing_kwargs={"use_reentrant": False}, or output_router_logits=False'
            )
        return measure_imbalance(
            [logits_TE for logits_TE, _, _ in routed],
            [chosen_TK for _, _, chosen_TK in routed],
            pooled=self.config.topology == "global_pool",
            attention_mask=attention_mask,
        )

    @contextmanager
    def _watch_routers(self, *, enabled: bool) -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
        """Collect the outputs of every router, in layer order."""
        routed: list[tuple[Tensor, Tensor, Tensor]] = []
        with ExitStack() as hooks:
            for ffn in self._sparse_ffns() if enabled else ():
                hooks.enter_context(
                    ffn.gate.register_forward_hook(lambda _gate, _inputs, output: routed.append(output))
                )
            yield routed

    def prepare_inputs_for_generation(
        self,
        *args: Any,  # noqa: ANN401
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> dict[str, Any]:
        """Prepare inputs as the dense family does; generate() takes `inputs_embeds` only if it is named here."""
        inputs: dict[str, Any] = self._dense.prepare_inputs_for_generation(*args, inputs_embeds=inputs_embeds, **kwargs)
        return inputs

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        """Refuse arguments that neither this class nor the dense family's knows; the family's may take images."""
        own = inspect.signature(self.forward).parameters
        self._dense._validate_model_kwargs({key: value for key, value in model_kwargs.items() if key not in own})


def _delegate(name: str) -> Callable[..., Any]:
    """A method that calls the dense model's."""

    def call(self: TinyONNForCausalLM, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return getattr(self._dense, name)(*args, **kwargs)

    return call


# With images these are the family's: features of an image, or positions in three dimensions.
for _step in ("maybe_prepare_encoder_kwargs", "prepare_position_ids", "expand_inputs", "update_model_kwargs"):
    setattr(TinyONNForCausalLM, f"_{_step}_for_generation", _delegate(f"_{_step}_for_generation"))

# With label smoothing, Trainer shifts the labels only of models in this list; the others would learn to repeat a token.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[TinyONNConfig.model_type] = TinyONNForCausalLM.__name__


def measure_imbalance(
    logits: list[Tensor], chosen: list[Tensor], *, pooled: bool, attention_mask: Tensor | None = None
) -> Tensor:
    """Load balancing loss: E · Σ_e (share of tokens that chose e) · (mean probability of e).

    Args:
        logits: ``(T, E)`` by layer.
        chosen: ``(T, K)`` by layer.
        pooled: all layers share the experts: the load is counted over all layers together. Else the loss is the mean
            over layers.
        attention_mask: ``(B, S)``, B·S = T; tokens where it is 0 do not count. Masks of other shapes are ignored.
    Returns:
        A scalar: K for an even load, up to E if the same K experts get every token.
    Source: Switch Transformers, arXiv:2101.03961 eq. 4; differs: top K, and by layer.
    """
    layers_LTE = torch.stack([layer.to(logits[0].device) for layer in logits])
    shares_LTE = layers_LTE.sigmoid()
    probability_LTE = shares_LTE / shares_LTE.sum(-1, keepdim=True)
    chosen_LTK = torch.stack([layer.to(layers_LTE.device) for layer in chosen])
    load_LTE = torch.zeros_like(probability_LTE).scatter_(-1, chosen_LTK, 1.0)
    weight_T1 = _token_weights(attention_mask, probability_LTE)
    axes = (0, 1) if pooled else 1
    tokens = weight_T1.sum() * (len(layers_LTE) if pooled else 1)
    load, probability = ((part_LTE * weight_T1).sum(axes) / tokens for part_LTE in (load_LTE, probability_LTE))
    return layers_LTE.shape[-1] * (load * probability).sum(-1).mean()


def _token_weights(attention_mask: Tensor | None, like_LTE: Tensor) -> Tensor:
    count = like_LTE.shape[1]
    # While generating with a cache, the mask covers tokens that are not in this pass.
    if attention_mask is None or attention_mask.ndim != 2 or attention_mask.numel() != count:
        return like_LTE.new_ones(count, 1)
    return attention_mask.reshape(-1, 1).to(like_LTE)
