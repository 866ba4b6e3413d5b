"""Configuration of TinyONN: that of the dense model, and that of the sparse FFNs.

This file is copied into the checkpoint's folder: it needs only transformers, 4.57 or later.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import transformers
from transformers import AutoConfig, PretrainedConfig

TOPOLOGIES = ("per_layer", "global_pool")

# Stored in `dense`; generate(), Trainer, TRL and resize_token_embeddings() look for them at the top level.
_SHARED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "sliding_window", "initializer_range", "tie_word_embeddings", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "final_logit_softcapping",
)  # fmt: skip
_DEFAULTS_OF_VERSION_4 = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")


class TinyONNConfig(PretrainedConfig):  # type: ignore[misc]  # transformers is not typed
    """Configuration of a TinyONNForCausalLM.

    Args:
        dense: config.json of the dense model, by transformers 4 or 5; None: transformers' default Llama.
        num_experts: E.
        num_experts_per_tok: K.
        moe_intermediate_size: N, the width of an expert; grouped kernels need a multiple of 8.
        shared_intermediate_size: S, the width of the shared FFN that every token passes; 0: there is none.
        routed_scaling_factor: factor of the gates.
        norm_topk_prob: the K chosen gates are normalised to a sum of 1 before the factor.
        topology: per_layer, E experts in every layer; or global_pool, E experts in all, shared by every layer.
        dense_layers: numbers of the layers that keep the dense model's FFN.
        router_aux_loss_coef: weight of the load balancing loss.
        output_router_logits: return router logits, and add the load balancing loss to the loss.
        dense_class: the dense model's class in transformers; None: that of causal language models.
        ffn: where the dense model has its FFNs: `layers`, the list's name; `module`, a path in a layer; `activation`, a
            path in the FFN, or after a colon a name in ACT2FN; after a slash, its quotient by its argument.
        kwargs: values that replace those in `dense`, and keys that transformers writes to every config.json.
    Raises:
        ValueError: an unknown topology, or K is not in 1 ... E.
    """

    model_type = "tiny_onn"
    has_no_defaults_at_init = True
    keys_to_ignore_at_inference: ClassVar = ["cache", "past_key_values", "router_logits"]  # Trainer adds a list

    def __init__(
        self,
        dense: Mapping[str, Any] | PretrainedConfig | None = None,
        num_experts: int = 1,
        num_experts_per_tok: int = 1,
        moe_intermediate_size: int = 8,
        shared_intermediate_size: int = 0,
        routed_scaling_factor: float = 1.0,
        norm_topk_prob: bool = True,
        topology: str = "per_layer",
        dense_layers: Sequence[int] = (),
        router_aux_loss_coef: float = 0.001,
        output_router_logits: bool = False,
        dense_class: str | None = None,
        ffn: Mapping[str, str] | None = None,
        **kwargs: Any,  # noqa: ANN401 - the other keys of config.json
    ) -> None:
        """Check the values, and read the configuration of the dense model."""
        if topology not in TOPOLOGIES:
            raise ValueError(f"topology={topology!r} is not one of {', '.join(TOPOLOGIES)}")
        if not 1 <= num_experts_per_tok <= num_experts:
            raise ValueError(f"num_experts_per_tok={num_experts_per_tok} is not in 1 ... num_experts={num_experts}")
        self.dense = dense if isinstance(dense, PretrainedConfig) else _dense_config(dense or {"model_type": "llama"})
        self.dense_class = dense_class
        self.ffn = {"layers": "model.layers", "module": "mlp", "activation": "act_fn"} | dict(ffn or {})
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.moe_intermediate_size = moe_intermediate_size
        self.shared_intermediate_size = shared_intermediate_size
        self.routed_scaling_factor = routed_scaling_factor
        self.norm_topk_prob = norm_topk_prob
        self.topology = topology
        self.dense_layers = [*dense_layers]
        self.router_aux_loss_coef = router_aux_loss_coef
        self.output_router_logits = output_router_logits
        shared = self._shared() | {"layer_types": getattr(self, "layer_types", None)}
        changed = {key: value for key, value in kwargs.items() if key not in shared or value != shared[key]}
        # Else transformers 4 sets these to its own defaults, also in `dense`.
        super().__init__(**{key: shared[key] for key in _DEFAULTS_OF_VERSION_4 if key in shared} | changed)

    @property
    def logit_scale(self) -> float:
        """Factor of the logits, for TRL and vLLM, which compute them from the last hidden states."""
        return 1 / float(getattr(self.dense, "logits_scaling", 1.0))

    def to_dict(self) -> dict[str, Any]:
        """The contents of config.json, with the keys of `dense` in _SHARED also at the top level."""
        described: dict[str, Any] = super().to_dict()
        return described | self._shared()

    def _shared(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in _SHARED if hasattr(self, key)}

    def _owner(self, key: str) -> PretrainedConfig:
        """The configuration that has this key: wrappers say outside of the text's whether embeddings are tied."""
        return self.dense if key == "tie_word_embeddings" else self.dense.get_text_config(decoder=True)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PretrainedConfig:
        """The dense decoder's, from which generate() makes caches for its kinds of layers."""
        if "dense" not in self.__dict__:
            return self
        text: PretrainedConfig = self.dense.get_text_config(decoder=decoder, encoder=encoder)
        return text


_KINDS = {*transformers.configuration_utils.ALLOWED_LAYER_TYPES}


def _share(key: str) -> property:
    """A property that reads and writes this attribute of `dense`."""

    def read(self: TinyONNConfig) -> Any:  # noqa: ANN401
        try:
            found = getattr(self._owner(key), key)
        except Exception as error:  # some keys have a value for each layer, and their error is no AttributeError
            raise AttributeError(key) from error
        if key == "layer_types" and not _KINDS.issuperset(found or ()):
            raise AttributeError(key)  # kinds of a family's own, as Nemotron-H's, that only its own class may have
        return found

    def write(self: TinyONNConfig, value: Any) -> None:  # noqa: ANN401
        setattr(self._owner(key), key, value)

    return property(read, write)


# Kinds of layers are read, but not written twice: some configurations derive them.
for _key in (*_SHARED, "layer_types"):
    setattr(TinyONNConfig, _key, _share(_key))


def _dense_config(stored: Mapping[str, Any]) -> PretrainedConfig:
    keys = dict(stored)
    if int(transformers.__version__.split(".")[0]) < 5:
        keys |= _rope_of_version_4(keys.get("rope_parameters") or {})
    kind = keys.pop("model_type")
    # As AutoConfig.from_pretrained reads a config.json: with windows in some layers it is Ministral.
    return AutoConfig.for_model("ministral" if kind == "mistral" and "layer_types" in keys else kind, **keys)


def _rope_of_version_4(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Position encoding in the keys of transformers 4, which silently ignores `rope_parameters`."""
    if not rope:
        return {}
    if "full_attention" not in rope:
        return _flat_rope(rope)
    keys = _flat_rope(rope["full_attention"])
    if "sliding_attention" in rope:
        keys["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    return keys


def _flat_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    plain = scaling.get("rope_type", "default") == "default"
    return {"rope_theta": rope["rope_theta"], "rope_scaling": None if plain else scaling}
