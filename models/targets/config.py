"""The MoE targets of this folder: selection, checks, config.json, and parameter counts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from math import prod
from pkgutil import iter_modules
from typing import Any

from instruments.dtypes import dtype_name
from instruments.errors import ConfigError
from models import targets
from models.config import MoEShape
from models.dense import DENSE_FAMILIES, keeps_tied
from models.targets.base import ConfigInput, MoETarget, expert_width, gate_scale_of, shared_width

# The `TARGETS` of every module in this folder.
MOE_TARGETS: dict[str, MoETarget] = {}
for _module in iter_modules(targets.__path__, f"{targets.__name__}."):
    if _module.name != __name__:
        MOE_TARGETS |= {target.model_type: target for target in getattr(import_module(_module.name), "TARGETS", ())}


def targets_of(source_model_type: str, always_on: int) -> list[MoETarget]:
    """The targets that can hold a family's attention and this many always-on neurons, lowest rank first."""
    able = [
        target
        for target in MOE_TARGETS.values()
        if source_model_type in target.sources and (target.has_shared or not always_on)
    ]
    return sorted(able, key=lambda target: target.sources[source_model_type])


def select_target(source: Mapping[str, Any], requested: str, always_on: int, *, pooled: bool = False) -> MoETarget:
    """Select the target architecture: one of MOE_TARGETS by name, or with `auto` the first of `targets_of` that fits.

    `source` is the dense checkpoint's config.json: `auto` takes a target that can hold its attention, and for a global
    pool one that supports it; `check_target` refuses others.
    Raises ConfigError: unknown name, or a target that cannot express this source or always-on neurons.
    """
    source_model_type = str(source["model_type"])
    able = targets_of(source_model_type, always_on)
    if requested == "auto":
        able = [target for target in able if target.packed_pool or not pooled]
        full = {**DENSE_FAMILIES[source_model_type].defaults, **source}
        return next(target for target in able if not any(_attention_problems(full, target)))
    if requested not in MOE_TARGETS:
        what = f"unknown target {requested!r}"
    elif source_model_type not in MOE_TARGETS[requested].sources:
        what = f"{requested} cannot hold the attention of {source_model_type}"
    elif MOE_TARGETS[requested] not in able:
        what = f"{requested} has no always-on neurons, {always_on} are wanted"
    else:
        return MOE_TARGETS[requested]
    names = ", ".join(target.model_type for target in able)
    raise ConfigError(what, where="assemble.target", do=f"assemble.target=auto, or one of {names}")


def check_target(config: Mapping[str, Any], target: MoETarget, shape: MoEShape) -> list[ConfigError]:
    """Errors for features of the source's config.json and of the shape that the selected target lacks."""
    family = DENSE_FAMILIES[str(config["model_type"])]
    source = {**family.defaults, **config}
    problems = list(_problems(source, target, shape))
    others = targets_of(family.model_type, shape.always_on) if problems else []
    do = next(
        (f"assemble.target={other.model_type}" for other in others if not any(_problems(source, other, shape))), ""
    )
    return [ConfigError(what, where=where, do=do) for what, where in problems]


def _attention_problems(source: Mapping[str, Any], target: MoETarget) -> Iterator[tuple[str, str]]:
    """Yield each missing feature of the source's attention and the key that needs it."""
    name, head_dim = target.model_type, source.get("head_dim")
    rope = source.get("rope_scaling") or source.get("rope_parameters") or {}  # as in transformers 5
    share = float(rope.get("partial_rotary_factor") or source.get("partial_rotary_factor") or 1)
    if "o" in DENSE_FAMILIES[source["model_type"]].attention_biases(source) and not target.output_bias:
        yield f"{name} has no bias on o_proj", "attention_bias in config.json"
    if source["model_type"] in _WINDOWED and source["sliding_window"] is not None and not target.sliding_window:
        yield f"{name} has no sliding window", "sliding_window in config.json"
    if not target.layer_windows and source.get("use_sliding_window") and _sliding_layers(source):
        yield f"{name} has one window for all layers or none", "use_sliding_window in config.json"
    if not target.layer_windows and source["model_type"] == "mistral" and source.get("layer_types"):  # Ministral
        yield f"{name} has one window for all layers or none", "layer_types in config.json"
    if not target.head_dim and head_dim and head_dim != source["hidden_size"] // source["num_attention_heads"]:
        yield f"{name} cannot have head_dim={head_dim}", "head_dim in config.json"
    if not target.partial_rotation and share != 1:
        yield f"{name} rotates whole heads, not {share:g} of each", "partial_rotary_factor in config.json"


def _problems(source: Mapping[str, Any], target: MoETarget, shape: MoEShape) -> Iterator[tuple[str, str]]:
    """Yield each missing feature and the setting that needs it."""
    yield from _attention_problems(source, target)
    name = target.model_type
    if shape.pooled and target.packed_pool is None:
        yield f"{name} has experts of every layer's own, no pool that all layers share", "topology=global_pool"
    first = tuple(range(len(shape.dense_layers)))
    if shape.dense_layers and not (
        target.dense_layers == "any" or (target.dense_layers == "first" and shape.dense_layers == first)
    ):
        able = "no dense layers" if target.dense_layers == "none" else "dense layers only before all others"
        yield f"{name} has {able}", f"dense_layers={[*shape.dense_layers]}"
    if shape.experts < target.least_experts:
        yield f"{name} needs at least {target.least_experts} experts", f"experts={shape.experts}"


# Families whose layers all share one window.
_WINDOWED = frozenset({"mistral", "phi3"})


def _sliding_layers(source: Mapping[str, Any]) -> bool:
    if source.get("sliding_window", 4096) is None:
        return False
    kinds = source.get("layer_types")
    if kinds is not None:
        return "sliding_attention" in kinds
    return int(source.get("max_window_layers", 28)) < int(source["num_hidden_layers"])


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
    source: Mapping[str, Any], target: MoETarget, shape: MoEShape, dtype: str, pad_to: int | None = None
) -> dict[str, Any]:
    """The MoE's config.json, from the dense checkpoint's, which transformers 4 or 5 wrote.

    `dtype` is float32, bfloat16 or float16; `pad_to`: see `expert_width`.
    """
    gate_scale = gate_scale_of(target, shape)
    width, shared = expert_width(shape, pad_to), shared_width(target, shape, pad_to)
    given = ConfigInput(source, shape, width, shared, gate_scale, dtype)
    if target.is_tiny_onn:
        return target.config_keys(given)
    dense = {"hidden_act": "silu", **DENSE_FAMILIES[str(source["model_type"])].defaults, **source}
    rope = _rope(dense)
    config = _common_keys(dense, target, shape, dtype) | rope
    if not target.selection_bias:
        # Architectures with a selection bias have no balancing loss, and trainers would request it if the keys were
        # present. The weight is 0, else TRL adds the loss: a carve's routers are not fitted to even load.
        config |= {"output_router_logits": False, "router_aux_loss_coef": 0.0}
    if "transformers_version" in dense:
        # Tokenizer fixes of transformers depend on the version that wrote the checkpoint.
        config["transformers_version"] = dense["transformers_version"]
    config |= target.config_keys(replace(given, dense=dense | rope))
    if gate_scale.routed_scaling_factor is not None:
        config["routed_scaling_factor"] = gate_scale.routed_scaling_factor
    if gate_scale.norm_topk_prob is not None:
        config["norm_topk_prob"] = gate_scale.norm_topk_prob
    return config


def _common_keys(dense: Mapping[str, Any], target: MoETarget, shape: MoEShape, dtype: str) -> dict[str, Any]:
    heads = dense["num_attention_heads"]
    return {
        "architectures": [target.architecture],
        "model_type": target.model_type,
        **{key: dense[key] for key in _CARRIED},
        **{key: dense.get(key, default) for key, default in _CARRIED_OR_DEFAULT.items()},
        "num_key_value_heads": dense.get("num_key_value_heads") or heads,
        "head_dim": dense.get("head_dim") or dense["hidden_size"] // heads,
        "intermediate_size": dense["intermediate_size"],
        "num_experts_per_tok": shape.top_k,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "dtype": dtype,
    }


def source_dtype(source: Mapping[str, Any]) -> str | None:
    """The number format named in config.json, if any."""
    named = source.get("dtype") or source.get("torch_dtype")
    return None if named is None else dtype_name(named)


def _rope(dense: Mapping[str, Any]) -> dict[str, Any]:
    """The position encoding in the spellings of transformers 4 and 5."""
    # As in transformers 5, which ignores the other where both are given.
    stored = dict(dense.get("rope_scaling") or dense.get("rope_parameters") or {})
    theta = stored.pop("rope_theta", None) or dense.get("rope_theta") or _DEFAULT_THETA
    # Sources that rotate part of each head are refused, so the factor is 1.
    stored.pop("partial_rotary_factor", None)
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
    """All parameters, and those active for one token."""

    total: int
    active: int


def count_dense(source: Mapping[str, Any]) -> ParameterCount:
    """Count a dense model's parameters by its config.json; a tied embedding counts once."""
    ffn = 3 * int(source["hidden_size"]) * int(source["intermediate_size"])
    total = _count_kept(source, tied=keeps_tied(source)) + int(source["num_hidden_layers"]) * ffn
    return ParameterCount(total, total)


def count_carved(
    source: Mapping[str, Any], target: MoETarget, shape: MoEShape, pad_to: int | None = None
) -> ParameterCount:
    """Count the parameters that `emit_checkpoint` writes, the zero neurons of padding included.

    A pool's K active experts count in every layer. Selection biases are buffers and do not count. `source` is the dense
    checkpoint's config.json.
    """
    hidden, layers = int(source["hidden_size"]), int(source["num_hidden_layers"])
    expert = 3 * hidden * expert_width(shape, pad_to)
    router = hidden * (shape.experts + bool(target.shared_router))
    layer = router + 3 * hidden * shared_width(target, shape, pad_to)
    dense, carved = len(shape.dense_layers), layers - len(shape.dense_layers)
    others = _count_kept(source, tied=target.is_tiny_onn and keeps_tied(source)) + carved * layer
    others += dense * 3 * hidden * int(source["intermediate_size"])
    experts = shape.experts * expert * (1 if shape.pooled else carved)
    return ParameterCount(others + experts, others + shape.top_k * expert * carved)


def _count_kept(source: Mapping[str, Any], *, tied: bool) -> int:
    """Parameters of embeddings, attention and norms."""
    family = DENSE_FAMILIES[str(source["model_type"])]
    hidden = int(source["hidden_size"])
    layer = sum(prod(shape) for shape in family.kept_shapes(source).values())
    embeddings = int(source["vocab_size"]) * hidden * (1 if tied else 2)
    return embeddings + int(source["num_hidden_layers"]) * layer + hidden
