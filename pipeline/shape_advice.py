"""Errors, costs and weaknesses of a shape, and better settings."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from instruments.errors import ConfigError
from models.config import MoEShape
from models.dense import keeps_tied
from models.targets.base import ALIGNMENT, RUNTIMES, expert_width
from models.targets.config import check_target, count_dense
from pipeline.disk import expected_bytes, in_mib
from pipeline.shape import EXPERT_WIDTH, ShapeRequest, fill_experts, resolve_shape

log = logging.getLogger(__name__)

LEAST_ROUTED = 0.25  # smallest routed share of a token's active neurons without a warning
MOST_GROWTH = 1.5  # largest number of parameters without a warning, relative to the dense model


def shape_faults(shape: MoEShape, width: int) -> list[tuple[str, str]]:
    """Errors of a shape for FFNs of `width` neurons, each with a note for its `where`."""
    faults = []
    if shape.top_k > shape.experts:
        faults.append((f"top_k={shape.top_k} is more than experts={shape.experts}", ""))
    if shape.always_on >= width:
        most = f"at most {width - 1} of {width} can be always on"
        faults.append((f"always_on={shape.always_on} leaves no neuron to route; {most}", ""))
    elif shape.n > (routable := width - shape.always_on):
        what = f"n={shape.n} needs at least {shape.n} neurons a layer that are not always on; there are {routable}"
        faults.append((what, f", {shape.always_on} of them always on"))
    return faults


def dense_layer_errors(request: ShapeRequest) -> Iterator[ConfigError]:
    """Errors: the model has no such layer, a pool is requested, or nothing is left for the other layers."""
    layers, asked = request.layers, request.dense_layers
    where = f"setting dense_layers={[*asked]}"
    if unknown := [layer for layer in asked if not 0 <= layer < layers]:
        what = f"no layer {', '.join(map(str, unknown))}: the model has {layers}"
        yield ConfigError(what, where=where, do="dense_layers=[]")
    elif asked and request.pooled:
        yield ConfigError("a pool serves every layer: none stays dense", where=where, do="dense_layers=[]")
    elif asked and len(asked) == layers:
        yield ConfigError(f"all {layers} layers dense: none is left to carve", where=where, do="dense_layers=[]")
    elif asked and request.carved_share <= 0 and None in (request.experts, request.n, request.top_k, request.always_on):
        what = f"{len(asked)} of {layers} layers dense leave nothing of active={request.active:g} to the others"
        yield ConfigError(what, where=where, do="dense_layers=[]")


def shape_errors(request: ShapeRequest, shape: MoEShape, model: str) -> Iterator[ConfigError]:
    """Errors of a shape, each with better settings; `model` is the source's label."""
    if faults := shape_faults(shape, request.width):
        do = find_remedy(request) or "a model with wider FFNs"
        for what, more in faults:
            yield ConfigError(what, where=f"shape, model={model} with F={request.width} neurons a layer{more}", do=do)
    if (stored := expert_width(shape, request.assemble.pad_to)) % ALIGNMENT:
        what = (
            f"experts of {stored} neurons on disk: grouped_mm, by which transformers runs them, needs a multiple of 8"
        )
        yield ConfigError(what, where=f"n={shape.n}, assemble.pad_to={request.assemble.pad_to}", do="assemble.pad_to=8")


def shape_warnings(request: ShapeRequest, shape: MoEShape) -> Iterator[str]:
    """Weaknesses of a valid shape."""
    width, layers, active = request.width, request.layers, shape.active_width
    if active >= width:
        yield (
            f"no saving: top_k={shape.top_k} x n={shape.n} + always_on={shape.always_on} = {active} neurons serve each "
            f"token, the dense FFN has {width}"
        )
    if shape.top_k == shape.experts:
        yield f"no routing: every token is sent to every expert (top_k={shape.top_k} of {shape.experts})"
    elif (routed := shape.top_k * shape.n) < LEAST_ROUTED * active:
        yield (
            f"little routing: {routed:,} of {active:,} active neurons are chosen for a token ({routed / active:.0%}), "
            "the others are always on"
        )
    dropped = width - shape.always_on - shape.experts * shape.n
    if dropped > 0 and not shape.pooled:
        yield f"dropped: {dropped:,} of {width:,} neurons a layer are in no expert and not always on"
    if shape.pooled and (neurons := shape.neurons(layers)) >= width * layers:
        yield (
            f"no smaller: the pool's {shape.experts} x {shape.n} neurons and {layers} x {shape.always_on} "
            f"always-on ones are {neurons:,}, the dense FFNs have {width * layers:,}"
        )
    total, dense = request.count(shape).total, count_dense(request.source).total
    if total > MOST_GROWTH * dense:
        yield f"larger: {in_millions(total)} parameters, {total / dense:.1f} x the dense model's {in_millions(dense)}"


def log_shape(request: ShapeRequest, shape: MoEShape | None, model: str) -> None:
    """Log the source, the shape and its costs, and warn of the shape's weaknesses; `model` is the source's label."""
    source = f"{model}: {request.layers} layers of {request.width} neurons"
    if shape is None:
        log.info("%s\n", source)
        return
    experts = f"{shape.experts} experts of {shape.n}{' in all, shared by every layer' if shape.pooled else ''}"
    log.info("%s -> %s, %d per token, and %d always on", source, experts, shape.top_k, shape.always_on)
    log.info("%s\n", "\n".join(f"  {line}" for line in describe_shape(request, shape)))
    if warnings := [*shape_warnings(request, shape)]:
        remedy = find_remedy(request)
        log.warning("%s\n", "\n".join([*warnings, *([f"  do:    {remedy}"] if remedy else [])]))


def find_remedy(request: ShapeRequest) -> str | None:
    """Settings of the closest shape without weaknesses, ready to paste; None if there is none."""
    target = request.assemble.target
    for name in dict.fromkeys([target, "auto", "tiny_onn"]):
        tried = replace(request, assemble=replace(request.assemble, target=name))
        for shape in filter(partial(_is_good, tried), _close_shapes(request)):
            words = [f"experts={shape.experts}"] * (shape.experts != request.experts)
            words += [f"n={shape.n}"] * (shape.n != request.n)
            words += [f"top_k={shape.top_k}", f"always_on={shape.always_on}"]
            return " ".join([*words, *[f"assemble.target={name}"] * (name != target)])
    return None


def _close_shapes(request: ShapeRequest) -> list[MoEShape]:
    """Candidates to suggest instead of the requested shape, the closest first; some have weaknesses themselves."""
    # active=1 saves nothing.
    asked = replace(request, top_k=None, active=request.active if request.active < 1 else 0.5)
    width, (experts, n) = request.width, fill_experts(request, request.width)
    open_split = replace(asked, always_on=None)
    sizes = dict.fromkeys([min(n, EXPERT_WIDTH), n, 64, 128, 256, 32, 16, 8, 4, 2, 1])
    tried = [asked, open_split]
    if request.pooled:
        half = request.layers * width // 2  # of the dense FFNs' neurons
        tried += [replace(open_split, experts=max(1, half // size), n=size) for size in sizes]
        return [resolve_shape(candidate, width) for candidate in tried]
    if request.experts and fill_experts(parts := replace(open_split, n=None), width)[1] >= EXPERT_WIDTH:
        tried.append(parts)
    for size in sizes:
        tried.append(replace(open_split, experts=None, n=size))
        tried.append(replace(asked, experts=-(-width // size), n=size, always_on=0))
    if request.top_k is not None and request.always_on is None:
        tried.insert(0, replace(request, experts=experts, n=n, always_on=max(0, width - experts * n)))
    return [resolve_shape(candidate, width) for candidate in tried]


def _is_good(request: ShapeRequest, shape: MoEShape) -> bool:
    """Whether a shape is valid, its target can express it, and it has no weaknesses."""
    if shape_faults(shape, request.width):
        return False
    try:
        target = request.target(shape)
    except ConfigError:
        return False
    return not check_target(request.source, target, shape) and not any(shape_warnings(request, shape))


def describe_shape(request: ShapeRequest, shape: MoEShape) -> list[str]:
    """Active neurons and the routed share of them, parameters, size on disk, and runtimes."""
    dense, carved, target = count_dense(request.source), request.count(shape), request.target(shape)
    routed, active = shape.top_k * shape.n, shape.active_width
    kept = ", ".join(map(str, shape.dense_layers))
    share = shape.active_share(request.width, request.layers)
    lines = [f"dense       layers {kept} keep all neurons: {share:.0%} active on average"] if kept else []
    lines += [
        f"neurons     {active:,} of {request.width:,} serve a token ({active / request.width:.0%} active), "
        f"{routed:,} of them chosen for it ({routed / active:.0%} routed)",
        f"parameters  {in_millions(carved.total)} ({carved.total / dense.total:.2f} x the dense model's "
        f"{in_millions(dense.total)}), {in_millions(carved.active)} active per token "
        f"({carved.active / dense.total:.2f} x)",
    ]
    if keeps_tied(request.source) and not target.is_tiny_onn:
        head = in_millions(int(request.source["vocab_size"]) * int(request.source["hidden_size"]))
        lines.append(f"            {head} of both are the output embedding, in the dense model the input's")
    size = expected_bytes("assemble", request.source, shape, request.assemble)
    served = target.served_by(shape, request.source)
    not_served = [name for name in RUNTIMES if name not in served]
    serving = f"{target.architecture}: {', '.join(['transformers', *served])}"
    serving += f"; not {', '.join(not_served)}" if not_served else ""
    return [*lines, f"checkpoint  about {in_mib(size)} on disk", f"serving     {serving}"]


def in_millions(count: int) -> str:
    """A number of parameters as text."""
    return f"{count / 1e9:,.2f} B" if count >= 1e9 else f"{count / 1e6:,.2f} M"
