"""config.json of a carve, and the number of parameters that it describes."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from instruments.dtypes import dtype_name
from models.config import MoEShape
from models.decoder import PROJECTIONS, Decoder
from models.targets.base import ConfigInput, MoETarget, expert_width, gate_scale_of, rope_of, shared_width

_DEFAULT_THETA = 10000.0

_CARRIED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "hidden_act", "rms_norm_eps",
    "max_position_embeddings",
)  # fmt: skip
_CARRIED_OR_DEFAULT = {
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def emit_config(
    decoder: Decoder, target: MoETarget, shape: MoEShape, dtype: str, pad_to: int | None = None, *, tied: bool
) -> dict[str, Any]:
    """The MoE's config.json, from the dense checkpoint's, which transformers 4 or 5 wrote.

    `dtype` is float32, bfloat16 or float16; `pad_to`: see `expert_width`; `tied`: the embeddings are one tensor
    on disk.
    """
    gate_scale = gate_scale_of(target, shape)
    width, shared = expert_width(shape, pad_to), shared_width(target, shape, pad_to)
    dense = decoder.config
    rope = {} if target.is_tiny_onn or (target.carries and not target.transformers_4) else _rope(dense)
    given = ConfigInput(decoder, {**dense, **rope}, tied, shape, width, shared, gate_scale, dtype)
    if target.is_tiny_onn:
        return target.config_keys(given)
    config: dict[str, Any] = {
        "architectures": [target.architecture],
        "model_type": target.model_type,
        "num_experts_per_tok": shape.top_k,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    text: Mapping[str, Any] = decoder.config_json.get("text_config") or decoder.config_json
    carried = {key: value for key, value in text.items() if key not in _OF_FILES}  # as they are written
    config |= (carried | config if target.carries else _shared_keys(dense)) | rope
    if not target.selection_bias:
        # Architectures with a selection bias have no balancing loss, and trainers would request it if the keys were
        # present. The weight is 0, else TRL adds the loss: a carve's routers are not fitted to even load.
        config |= {"output_router_logits": False, "router_aux_loss_coef": 0.0}
    if "transformers_version" in decoder.config_json:
        # Tokenizer fixes of transformers depend on the version that wrote the checkpoint.
        config["transformers_version"] = decoder.config_json["transformers_version"]
    config |= target.config_keys(given)
    if gate_scale.routed_scaling_factor is not None:
        config["routed_scaling_factor"] = gate_scale.routed_scaling_factor
    if gate_scale.norm_topk_prob is not None:
        config["norm_topk_prob"] = gate_scale.norm_topk_prob
    return _wrapped(decoder, target, config) if decoder.is_wrapper else config


def emit_text_config(
    decoder: Decoder, target: MoETarget, shape: MoEShape, pad_to: int | None = None, *, tied: bool
) -> dict[str, Any]:
    """What config.json will say of the carve's text decoder; keys that it leaves out are those of the dense model."""
    config = emit_config(decoder, target, shape, "bfloat16", pad_to, tied=tied)
    return {**decoder.config, **config.get("text_config", config)}


# Keys about the dense checkpoint's files and class, not about the model.
_OF_FILES = frozenset({"_name_or_path", "architectures", "auto_map", "model_type", "quantization_config"})


def _wrapped(decoder: Decoder, target: MoETarget, text: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a wrapper around the carved text model; its other parts are those of the dense one."""
    architecture, model_type = target.wrappers[str(decoder.config_json["model_type"])]
    of_text = {key: value for key, value in text.items() if key not in {"architectures", "transformers_version"}}
    rest = {key: value for key, value in decoder.config_json.items() if key not in _OF_FILES}
    dense_type = str(decoder.config_json["model_type"])
    for key, part in rest.items():  # such as the vision tower's, by the wrapper's name
        if isinstance(part, Mapping) and str(part.get("model_type")).startswith(dense_type):
            rest[key] = {**part, "model_type": model_type + part["model_type"].removeprefix(dense_type)}
    same = {key: text[key] for key in ("tie_word_embeddings", "torch_dtype", "dtype")}
    return {"architectures": [architecture], "model_type": model_type, **rest, **same, "text_config": of_text}


def _shared_keys(dense: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that all architectures of another family than the dense one share."""
    heads = dense["num_attention_heads"]
    return {
        **{key: dense[key] for key in _CARRIED},
        **{key: dense.get(key, default) for key, default in _CARRIED_OR_DEFAULT.items()},
        "num_key_value_heads": dense.get("num_key_value_heads") or heads,
        "head_dim": dense.get("head_dim") or dense["hidden_size"] // heads,
        "intermediate_size": dense["intermediate_size"],
    }


def source_dtype(source: Mapping[str, Any]) -> str | None:
    """The number format named in config.json, if any."""
    named = source.get("dtype") or source.get("torch_dtype")
    return None if named is None else dtype_name(named)


def _rope(dense: Mapping[str, Any]) -> dict[str, Any]:
    """The position encoding in the spellings of transformers 4 and 5."""
    stored = dict(rope_of(dense))
    # Without any, the default of the dense model's class, which transformers has put into rope_parameters.
    own = (dense.get("rope_parameters") or {}).get("rope_theta")
    theta = stored.pop("rope_theta", None) or dense.get("rope_theta") or own or _DEFAULT_THETA
    # A target that rotates part of each head writes the share itself. The others are Ministral 3's: its scale of the
    # queries, which no target has (see `long_texts`), and a length that is also outside.
    for key in ("partial_rotary_factor", "llama_4_scaling_beta", "max_position_embeddings"):
        stored.pop(key, None)
    kind = stored.pop("type", "default")
    # "su" is the name in early Phi-3 checkpoints.
    scaling = {"rope_type": "longrope" if kind == "su" else kind, **stored}
    top_level = {}
    # As in transformers 5: of these kinds, the length outside of the scaling precedes the one inside.
    original = dense.get("original_max_position_embeddings") or stored.get("original_max_position_embeddings")
    if original and scaling["rope_type"] in {"llama3", "yarn", "longrope"}:
        scaling["original_max_position_embeddings"] = original
    if scaling["rope_type"] == "longrope":
        # transformers 4 reads it outside of the scaling, transformers 5 inside.
        top_level = {"original_max_position_embeddings": original} if original else {}
        # Phi3's own class computes the factor from the two lengths; the others warn if it is missing.
        positions = dense["max_position_embeddings"]
        scaling = {"factor": positions / (original or positions), **scaling}
    return {
        "rope_theta": theta,
        "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
        "rope_parameters": {"rope_theta": theta, **scaling},
        **top_level,
    }


@dataclass(frozen=True)
class ParameterCount:
    """All parameters, and those active for one token, in both models alike.

    Tables of embeddings are not active, unless one is also the output embedding: a token reads one row of each. Nor are
    the parts that see images or hear.
    """

    total: int
    active: int


def count_dense(dense: Decoder) -> ParameterCount:
    """Count a dense model's parameters; a tied embedding counts once."""
    total = dense.count(dense.shapes)
    return ParameterCount(total, total - dense.count(dense.unread))


def count_carved(
    dense: Decoder, target: MoETarget, shape: MoEShape, pad_to: int | None = None, *, tied: bool = True
) -> ParameterCount:
    """Count the parameters that `emit_checkpoint` writes, the zero neurons of padding included.

    A pool's K active experts count in every layer. Selection biases and other buffers do not count.
    """
    expert = 3 * dense.hidden * expert_width(shape, pad_to)
    router = dense.hidden * (shape.experts + bool(target.shared_router))
    layer = router + 3 * dense.hidden * shared_width(target, shape, pad_to)
    layer += sum(prod(constant.shape) for constant in target.more(dense, shape).values())
    carved = dense.depth - len(shape.dense_layers)
    copied = dense.vocabulary * dense.hidden if dense.tied and not tied else 0  # an input embedding of its own
    others = dense.count(name for name in dense.shapes if name not in dense.ffn_names) + carved * layer + copied
    dense_layers = filter(dense.has_ffn, shape.dense_layers)
    others += dense.count({dense.weight(layer, part) for layer in dense_layers for part in PROJECTIONS})
    experts = shape.experts * expert * (1 if shape.pooled else carved)
    active = others + shape.top_k * expert * carved - dense.count(dense.unread) - copied
    return ParameterCount(others + experts, active)
