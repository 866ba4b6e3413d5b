"""The MoE targets of this folder, the choice among them, and their limits for a source and a shape."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import models.targets
from instruments.errors import ConfigError
from models.config import MoEShape
from models.dense import DENSE_FAMILIES
from models.targets.base import MoETarget


def _discover() -> Iterator[MoETarget]:
    """The `TARGETS` of every module in this folder."""
    for module in iter_modules(models.targets.__path__, "models.targets."):
        if module.name != __name__:
            yield from getattr(import_module(module.name), "TARGETS", ())


MOE_TARGETS: dict[str, MoETarget] = {target.model_type: target for target in _discover()}


def targets_of(source_model_type: str, always_on: int) -> list[MoETarget]:
    """The targets that can hold a family's attention and this many always-on neurons, best first."""
    able = [
        target
        for target in MOE_TARGETS.values()
        if source_model_type in target.sources and (target.has_shared or not always_on)
    ]
    return sorted(able, key=lambda target: target.sources[source_model_type])


def select_target(source_model_type: str, requested: str, always_on: int, *, pooled: bool = False) -> MoETarget:
    """The architecture that a carve becomes: one of MOE_TARGETS by name, or auto, the first of `targets_of`.

    Where all layers share their experts, `auto` takes a target that can say so, and `check_target` refuses others.
    Raises ConfigError: unknown name, or a target that cannot express this source or always-on neurons.
    """
    able = targets_of(source_model_type, always_on)
    if requested == "auto":
        return next(target for target in able if target.packed_pool or not pooled)
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
    """Features of a source, by its config.json, and of a shape that the target lacks and `select_target` let pass."""
    family = DENSE_FAMILIES[str(config["model_type"])]
    source = {**family.defaults, **config}
    problems = list(_problems(source, target, shape))
    others = targets_of(family.model_type, shape.always_on) if problems else []
    do = next(
        (f"assemble.target={other.model_type}" for other in others if not any(_problems(source, other, shape))), ""
    )
    return [ConfigError(what, where=where, do=do) for what, where in problems]


def _problems(source: Mapping[str, Any], target: MoETarget, shape: MoEShape) -> Iterator[tuple[str, str]]:
    """The missing features, each with the setting that asks for it."""
    name, head_dim = target.model_type, source.get("head_dim")
    derived_head_dim = int(source["hidden_size"]) // int(source["num_attention_heads"])
    rope = source.get("rope_parameters") or {}
    share = float(rope.get("partial_rotary_factor") or source.get("partial_rotary_factor") or 1)
    if "o" in DENSE_FAMILIES[source["model_type"]].attention_biases(source) and not target.output_bias:
        yield f"{name} has no bias on o_proj", "attention_bias in config.json"
    if source["model_type"] in _WINDOWED and source["sliding_window"] is not None and not target.sliding_window:
        yield f"{name} has no sliding window", "sliding_window in config.json"
    if not target.layer_windows and source.get("use_sliding_window") and _sliding_layers(source):
        yield f"{name} has one window for all layers or none", "use_sliding_window in config.json"
    if not target.head_dim and head_dim not in {None, derived_head_dim}:
        yield f"{name} cannot have head_dim={head_dim}", "head_dim in config.json"
    if not target.partial_rotation and share != 1:
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
