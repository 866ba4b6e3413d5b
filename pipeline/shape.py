"""From the dials to the shape of a carve."""

from dataclasses import dataclass

from models.errors import ConfigError
from models.shape import PER_LAYER, Shape


@dataclass(frozen=True)
class Dials:
    """What the user asked for; None is filled in from the source's FFN width."""

    experts: int
    n: int
    top_k: int | None
    always_on: int | None
    active: float
    topology: str = PER_LAYER


def resolve_shape(dials: Dials, width: int) -> Shape:
    """Fill in what was not asked for, so that about `active`·F neurons serve each token.

    Disjoint experts are to do half of it: top_k is the largest power of two (which keeps a folded scale exact in bf16)
    that fits, at least 2, at most E; always-on neurons fill the rest. Of experts that overlap (E·N > F) one is chosen:
    what several share would be computed twice. Where always_on is given, and in a global pool, where neurons of a
    layer's own would make the pool the smaller part of the model, experts do all the rest.

    Args:
        dials: the request.
        width: F of the source.
    """
    pooled, top_k, always_on = dials.topology != PER_LAYER, dials.top_k, dials.always_on
    if pooled and always_on is None:
        always_on = 0
    if top_k is None and always_on is None and dials.experts * dials.n > width:
        top_k = 1
    if top_k is None:
        routed = dials.active * width / 2 if always_on is None else dials.active * width - always_on
        top_k = min(max(2, largest_power_of_two(int(routed) // dials.n)), dials.experts)
    if always_on is None:
        always_on = max(0, round(dials.active * width) - top_k * dials.n)
    return Shape(dials.experts, dials.n, top_k, always_on, dials.topology)


def largest_power_of_two(bound: int) -> int:
    """The largest power of two <= bound, or 0."""
    return 1 << (bound.bit_length() - 1) if bound > 0 else 0


def shape_errors(shape: Shape, width: int, model: str) -> list[ConfigError]:
    """What is wrong with a shape for a source with FFNs `width` wide.

    Args:
        shape: the resolved shape.
        width: F of the source.
        model: the source's label, for the message.
    """
    where = f"shape, model={model} with F={width} units a layer"
    errors = []
    if shape.top_k > shape.experts:
        errors.append(
            ConfigError(
                f"top_k={shape.top_k} is more than experts={shape.experts}", where=where, do=f"top_k={shape.experts}"
            )
        )
    if shape.always_on >= width:
        errors.append(
            ConfigError(
                f"always_on={shape.always_on} leaves no unit to route; at most {width - 1} of {width} can be always on",
                where=where,
                do=f"always_on={width // 4}",
            )
        )
    elif shape.n > (routable := width - shape.always_on):
        errors.append(
            ConfigError(
                f"n={shape.n} needs at least {shape.n} units a layer that are not always on; there are {routable}",
                where=f"{where}, {shape.always_on} of them always on",
                do=f"n={largest_power_of_two(max(1, routable // 4))}, or a model with wider FFNs",
            )
        )
    return errors


def saving_warning(shape: Shape, width: int) -> str | None:
    """Why this shape computes no less than the dense model, or None."""
    if shape.active_width < width:
        return None
    return (
        f"no saving: top_k={shape.top_k} x n={shape.n} + always_on={shape.always_on} = {shape.active_width} neurons "
        f"serve each token, the dense FFN has {width}; lower n= or top_k="
    )


def pool_warning(shape: Shape, width: int, layers: int) -> str | None:
    """Why this pool is no smaller than the FFNs it stands for, or None."""
    if not shape.pooled or shape.neurons(layers) < width * layers:
        return None
    return (
        f"no smaller: the pool's {shape.experts} x {shape.n} neurons and {layers} x {shape.always_on} always-on ones "
        f"are {shape.neurons(layers):,}, the dense FFNs have {width * layers:,}; lower experts= or n="
    )
