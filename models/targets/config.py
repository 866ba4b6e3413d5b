"""The MoE targets of this folder: which one a dense decoder and a shape can have."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import pairwise
from pkgutil import iter_modules
from typing import Any

from instruments.errors import ConfigError
from models import targets
from models.config import MoEShape
from models.decoder import Decoder
from models.targets.base import MoETarget, rope_of, rotated_share

# The `TARGETS` of every module in this folder.
MOE_TARGETS: dict[str, MoETarget] = {}
for _module in iter_modules(targets.__path__, f"{targets.__name__}."):
    if _module.name != __name__:
        MOE_TARGETS |= {target.model_type: target for target in getattr(import_module(_module.name), "TARGETS", ())}


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the text decoder: all of it, if the model is no wrapper."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def carved_target(config: Mapping[str, Any]) -> tuple[MoETarget, str] | None:
    """The target and the class that the config.json of a carve names, of a wrapper by both parts; None: no carve."""
    model_type, text_type = config.get("model_type"), text_of(config).get("model_type")
    target = MOE_TARGETS.get(text_type) if isinstance(text_type, str) else None
    if target is None:
        return None
    classes = {name: wrapper for wrapper, name in target.wrappers.values()} | {target.model_type: target.architecture}
    architecture = classes.get(model_type) if isinstance(model_type, str) else None
    return (target, architecture) if architecture else None


def target_of(config: Mapping[str, Any]) -> tuple[MoETarget, str]:
    """As `carved_target`, of the config.json of a carve."""
    carved = carved_target(config)
    assert carved is not None, "checked by check_carve"
    return carved


def targets_of(dense: Decoder, shape: MoEShape) -> list[MoETarget]:
    """The targets that can hold a decoder and this many always-on neurons, lowest rank first; TinyONN is the last."""
    able = [target for target in MOE_TARGETS.values() if target.rank(dense) is not None and target.has_room(shape)]
    return sorted(able, key=lambda target: target.rank(dense) or 0)


def select_target(dense: Decoder, requested: str, shape: MoEShape) -> MoETarget:
    """Select the target architecture: one of MOE_TARGETS by name, or with `auto` the first of `targets_of` that fits.

    `auto` takes a target that can hold the attention, and for a global pool one that supports it; `check_target`
    refuses others.
    Raises ConfigError: unknown name, or a target that cannot express this source or always-on neurons.
    """
    able = targets_of(dense, shape)
    if requested == "auto":
        able = [target for target in able if target.packed_pool or not shape.pooled]
        return next(target for target in able if not any(_attention_problems(dense, target)))
    if requested not in MOE_TARGETS:
        what = f"unknown target {requested!r}"
    elif MOE_TARGETS[requested].rank(dense) is None:
        part = "layers of several widths" if dense.narrow else "attention"
        what = f"{requested} cannot hold the {part} of {dense.model_type}"
    elif MOE_TARGETS[requested] not in able:
        room = f"at most {shape.n}" if MOE_TARGETS[requested].has_shared else "no"
        what = f"{requested} has {room} always-on neurons, {shape.always_on} are wanted"
    else:
        return MOE_TARGETS[requested]
    names = ", ".join(target.model_type for target in able)
    raise ConfigError(what, where="assemble.target", do=f"assemble.target=auto, or one of {names}")


def check_target(dense: Decoder, target: MoETarget, shape: MoEShape) -> list[ConfigError]:
    """Errors for features of the dense decoder and of the shape that the selected target lacks."""
    problems = list(_problems(dense, target, shape))
    others = targets_of(dense, shape) if problems else []
    do = next(
        (f"assemble.target={other.model_type}" for other in others if not any(_problems(dense, other, shape))),
        "topology=per_layer" if shape.pooled else "",
    )
    return [ConfigError(what, where=where, do=do) for what, where in problems]


def _attention_problems(dense: Decoder, target: MoETarget) -> Iterator[tuple[str, str]]:
    """Yield each missing feature of the dense attention and the key that needs it."""
    if reason := target.refuses(dense):
        yield reason, "config.json"
    if target.is_tiny_onn or target.carries:
        return
    config, name = dense.config, target.model_type
    head_dim = config.get("head_dim")
    if any(isinstance(value, dict) for value in rope_of(config).values()):
        yield f"{name} has one position encoding for all layers", "rope_parameters in config.json"
    if not target.output_bias and any(tensor.endswith("o_proj.bias") for tensor in dense.shapes):
        yield f"{name} has no bias on o_proj", "attention_bias in config.json"
    if dense.windows == "all" and not (target.sliding_window or target.layer_windows):
        yield f"{name} has no sliding window", "sliding_window in config.json"
    if dense.windows == "some" and not target.layer_windows:
        yield f"{name} has one window for all layers or none", "layer_types in config.json"
    if not target.head_dim and head_dim and head_dim != config["hidden_size"] // config["num_attention_heads"]:
        yield f"{name} cannot have head_dim={head_dim}", "head_dim in config.json"
    if not target.partial_rotation and (share := rotated_share(config)) != 1:
        yield f"{name} rotates whole heads, not {share:g} of each", "partial_rotary_factor in config.json"


def _problems(dense: Decoder, target: MoETarget, shape: MoEShape) -> Iterator[tuple[str, str]]:
    """Yield each missing feature and the setting that needs it."""
    yield from _attention_problems(dense, target)
    name = target.model_type
    if shape.pooled and target.packed_pool is None:
        yield f"{name} has experts of every layer's own, no pool that all layers share", "topology=global_pool"
    if shape.pooled and any(
        tensor.startswith(f"{dense.layers}.0.{dense.ffn.path}.") for tensor in dense.layer_names(0)
    ):
        yield "each layer's activation learns its own, and experts of a pool serve all layers", "topology=global_pool"
    carved = [layer for layer in range(dense.depth) if layer not in shape.dense_layers]
    together = all(after == layer + 1 for layer, after in pairwise(carved))
    able = {
        "none": (not shape.dense_layers, "no dense layers"),
        "first": (together and carved[-1:] == [dense.depth - 1], "dense layers only before all others"),
        "ends": (together, "dense layers only before and after all others"),
        "any": (True, ""),
    }
    fits, has = able[target.dense_layers]
    if not fits:
        yield f"{name} has {has}", f"dense_layers={[*shape.dense_layers]}"
    if shape.experts < target.least_experts:
        yield f"{name} needs at least {target.least_experts} experts", f"experts={shape.experts}"
