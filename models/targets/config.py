"""The MoE targets of this folder: which one a source and a shape can have."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from instruments.errors import ConfigError
from models import targets
from models.config import MoEShape
from models.dense import DENSE_FAMILIES
from models.targets.base import MoETarget

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
