"""Which MoE target a carve becomes, and what of a source and a shape a target cannot say."""

from collections.abc import Iterator, Mapping
from typing import Any

from instruments.errors import ConfigError
from models.dense import DENSE_FAMILIES
from models.shape import MoEShape
from models.targets.base import MOE_TARGETS, AlwaysOn, MoETarget

# The native targets of a source, best first; without one it becomes the project's own class.
_OWN_FAMILY = {
    "qwen3": ("qwen3_moe", "glm4_moe"),
    "qwen2": ("qwen2_moe",),
    "llama": ("mixtral", "glm4_moe"),
    "mistral": ("mixtral", "glm4_moe"),
    "phi3": ("mixtral", "glm4_moe"),
    "olmo2": ("flex_olmo",),
    "granite": ("granitemoe", "granitemoeshared"),
}


def select_target(source_model_type: str, requested: str, always_on: int, *, pooled: bool = False) -> MoETarget:
    """The architecture a carve becomes.

    Args:
        source_model_type: model_type of the dense checkpoint.
        requested: a name of MOE_TARGETS, or auto: the same family where that can say always-on neurons if there are
            any, else glm4_moe or tiny_onn.
        always_on: S.
        pooled: all layers share their experts, which tiny_onn alone can say; asked for by another name, that is left to
            `check_target`.
    Raises:
        ConfigError: unknown name, or a target that cannot say this source or always-on neurons.
    """
    if requested == "auto" and pooled:
        return MOE_TARGETS["tiny_onn"]
    if requested == "auto":
        native = [MOE_TARGETS[name] for name in _OWN_FAMILY.get(source_model_type, ())]
        able = [target for target in native if not always_on or target.always_on is not AlwaysOn.NONE]
        return able[0] if able else MOE_TARGETS["tiny_onn"]
    if requested not in MOE_TARGETS:
        raise _refusal(f"unknown target {requested!r}", source_model_type, always_on)
    target = MOE_TARGETS[requested]
    if source_model_type not in target.sources:
        raise _refusal(f"{requested} cannot hold the attention of {source_model_type}", source_model_type, always_on)
    if always_on and target.always_on is AlwaysOn.NONE:
        raise _refusal(f"{requested} has no always-on neurons, {always_on} are wanted", source_model_type, always_on)
    return target


def _refusal(what: str, source_model_type: str, always_on: int) -> ConfigError:
    able = [
        target.model_type
        for target in MOE_TARGETS.values()
        if source_model_type in target.sources and not (always_on and target.always_on is AlwaysOn.NONE)
    ]
    return ConfigError(what, where="assemble.target", do=f"assemble.target=auto, or one of {', '.join(able)}")


def check_target(config: Mapping[str, Any], target: MoETarget, shape: MoEShape) -> list[ConfigError]:
    """What of this source and shape the target cannot say, beside what `select_target` refuses.

    Args:
        config: config.json of the dense checkpoint.
        target: the architecture to write.
        shape: E, N, K, S.
    """
    family = DENSE_FAMILIES[str(config["model_type"])]
    source = {**family.defaults, **config}
    do = f"assemble.target={_able_target(source, shape).model_type}"
    return [ConfigError(what, where=where, do=do) for what, where in _problems(source, target, shape)]


def _able_target(source: Mapping[str, Any], shape: MoEShape) -> MoETarget:
    """The first that can say all of it; the own class, which is last, says everything."""
    return next(
        target
        for target in MOE_TARGETS.values()
        if source["model_type"] in target.sources
        and not (shape.always_on and target.always_on is AlwaysOn.NONE)
        and not any(_problems(source, target, shape))
    )


def _problems(source: Mapping[str, Any], target: MoETarget, shape: MoEShape) -> Iterator[tuple[str, str]]:
    """What the target cannot say, and where that stands."""
    name, head_dim, share = target.model_type, source.get("head_dim"), _rotated_share(source)
    if "o" in DENSE_FAMILIES[source["model_type"]].attention_biases(source) and not target.output_bias:
        yield f"{name} has no bias on o_proj", "attention_bias in config.json"
    if source["model_type"] in _WINDOWED and source["sliding_window"] is not None and not target.sliding_window:
        yield f"{name} has no sliding window", "sliding_window in config.json"
    if not target.own and source.get("use_sliding_window") and _sliding_layers(source):
        yield f"{name} has one window for all layers or none", "use_sliding_window in config.json"
    if not target.head_dim and head_dim not in {None, _derived_head_dim(source)}:
        yield f"{name} cannot say head_dim={head_dim}", "head_dim in config.json"
    if not target.own and share != 1.0:
        yield f"{name} rotates whole heads, not {share:g} of each", "partial_rotary_factor in config.json"
    if shape.pooled and target.packed_pool is None:
        yield f"{name} has experts of every layer's own, no pool that all layers share", "topology=global_pool"
    if shape.experts < target.least_experts:
        yield f"{name} needs at least {target.least_experts} experts", f"experts={shape.experts}"


# Families whose layers all share one window.
_WINDOWED = frozenset({"mistral", "phi3"})


def _sliding_layers(source: Mapping[str, Any]) -> bool:
    kinds = source.get("layer_types")
    if kinds is not None:
        return "sliding_attention" in kinds
    return int(source.get("max_window_layers", 28)) < int(source["num_hidden_layers"])


def _rotated_share(source: Mapping[str, Any]) -> float:
    stored = (source.get("rope_parameters") or {}).get("partial_rotary_factor")
    return float(stored or source.get("partial_rotary_factor") or 1.0)


def _derived_head_dim(source: Mapping[str, Any]) -> int:
    return int(source["hidden_size"]) // int(source["num_attention_heads"])
