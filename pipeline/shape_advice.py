"""Costs of a shape, warnings about it, and better settings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from instruments.errors import ConfigError
from models.config import MoEShape
from models.dense import keeps_tied
from models.targets.base import MoETarget
from models.targets.choose import check_target, select_target
from models.targets.config import ParameterCount, count_carved, count_dense
from pipeline.disk import expected_bytes, in_mib
from pipeline.shape import ShapeRequest, close_shapes, shape_faults
from stages.assemble.config import AssembleConfig

# Of the neurons that serve a token, fewer chosen for it than this share: experts hardly matter.
LEAST_ROUTED = 0.25
# All parameters, of the dense model's.
MOST_GROWTH = 1.5


@dataclass(frozen=True)
class Request:
    """A carve as it was asked for; its shape is judged by this."""

    dials: ShapeRequest
    assemble: AssembleConfig
    # The source's config.json.
    source: Mapping[str, Any]

    @property
    def width(self) -> int:
        """F of the source."""
        return int(self.source["intermediate_size"])

    @property
    def layers(self) -> int:
        """L of the source."""
        return int(self.source["num_hidden_layers"])

    def target(self, shape: MoEShape) -> MoETarget:
        """What the carved model becomes. Raises ConfigError: the target asked for cannot say this source or shape."""
        model_type = str(self.source["model_type"])
        return select_target(model_type, self.assemble.target, shape.always_on, pooled=shape.pooled)

    def count(self, shape: MoEShape) -> ParameterCount:
        """Parameters of the carved model. Raises ConfigError, as `target` does."""
        return count_carved(self.source, self.target(shape), shape, self.assemble.pad_to)


def describe_shape(request: Request, shape: MoEShape) -> list[str]:
    """Active neurons and the routed share of them, parameters, and size on disk."""
    dense, carved = count_dense(request.source), request.count(shape)
    routed, active = shape.top_k * shape.n, shape.active_width
    lines = [
        f"neurons     {active:,} of {request.width:,} serve a token ({active / request.width:.0%} active), "
        f"{routed:,} of them chosen for it ({routed / active:.0%} routed)",
        f"parameters  {in_millions(carved.total)} ({carved.total / dense.total:.2f} x the dense model's "
        f"{in_millions(dense.total)}), {in_millions(carved.active)} active per token "
        f"({carved.active / dense.total:.2f} x)",
    ]
    if keeps_tied(request.source) and not request.target(shape).own:
        head = int(request.source["vocab_size"]) * int(request.source["hidden_size"])
        lines.append(
            f"            {in_millions(head)} of both are the output embedding, in the dense model the input's"
        )
    size = expected_bytes("assemble", request.source, shape, request.assemble)
    return [*lines, f"checkpoint  about {in_mib(size)} on disk"]


def shape_errors(request: Request, shape: MoEShape, model: str) -> Iterator[ConfigError]:
    """Errors of a shape, each with better settings.

    Args:
        request: what was asked for.
        shape: what it was resolved to.
        model: the source's label, for the message.
    """
    if faults := shape_faults(shape, request.width):
        do = find_remedy(request) or "a model with wider FFNs"
        for what, more in faults:
            yield ConfigError(what, where=f"shape, model={model} with F={request.width} neurons a layer{more}", do=do)


def shape_warnings(request: Request, shape: MoEShape) -> list[str]:
    """Weaknesses of a sound shape; empty where there are none."""
    width, routed, active = request.width, shape.top_k * shape.n, shape.active_width
    found = []
    if active >= width:
        found.append(
            f"no saving: top_k={shape.top_k} x n={shape.n} + always_on={shape.always_on} = {active} neurons serve each "
            f"token, the dense FFN has {width}"
        )
    if shape.top_k == shape.experts:
        found.append(f"no routing: every token is sent to every expert (top_k={shape.top_k} of {shape.experts})")
    elif routed < LEAST_ROUTED * active:
        found.append(
            f"little routing: {routed:,} of {active:,} active neurons are chosen for a token ({routed / active:.0%}), "
            "the others are always on"
        )
    dropped = width - shape.always_on - shape.experts * shape.n
    if dropped > 0 and not shape.pooled:
        found.append(f"dropped: {dropped:,} of {width:,} neurons a layer are in no expert and not always on")
    neurons, dense_neurons = shape.neurons(request.layers), width * request.layers
    if shape.pooled and neurons >= dense_neurons:
        found.append(
            f"no smaller: the pool's {shape.experts} x {shape.n} neurons and {request.layers} x {shape.always_on} "
            f"always-on ones are {neurons:,}, the dense FFNs have {dense_neurons:,}"
        )
    total, dense = request.count(shape).total, count_dense(request.source).total
    if total > MOST_GROWTH * dense:
        found.append(
            f"larger: {in_millions(total)} parameters, {total / dense:.1f} x the dense model's {in_millions(dense)}"
        )
    return found


def find_remedy(request: Request) -> str | None:
    """Settings, to paste, of the closest shape without weaknesses; None if there is none."""
    for name in dict.fromkeys([request.assemble.target, "auto", "tiny_onn"]):
        tried = replace(request, assemble=replace(request.assemble, target=name))
        for shape in close_shapes(request.dials, request.width, request.layers):
            if is_good(tried, shape):
                words = [] if shape.experts == request.dials.experts else [f"experts={shape.experts}"]
                words += [] if shape.n == request.dials.n else [f"n={shape.n}"]
                words += [f"top_k={shape.top_k}", f"always_on={shape.always_on}"]
                words += [] if name == request.assemble.target else [f"assemble.target={name}"]
                return " ".join(words)
    return None


def is_good(request: Request, shape: MoEShape) -> bool:
    """Whether a shape is sound, its target can express it, and it has no weaknesses."""
    if shape_faults(shape, request.width):
        return False
    try:
        target = request.target(shape)
    except ConfigError:
        return False
    return not check_target(request.source, target, shape) and not shape_warnings(request, shape)


def in_millions(count: int) -> str:
    """Parameters for reading."""
    return f"{count / 1e9:,.2f} B" if count >= 1e9 else f"{count / 1e6:,.2f} M"
