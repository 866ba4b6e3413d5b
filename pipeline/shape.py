"""Resolves the dials to the shape of a carve; its errors, costs and weaknesses, and better settings."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

from instruments.errors import ConfigError
from models.config import PER_LAYER, MoEShape
from models.decoder import Decoder
from models.targets.base import RUNTIMES, MoETarget
from models.targets.config import check_target, select_target
from models.targets.config_json import ParameterCount, count_carved, count_dense, emit_text_config
from pipeline.disk import expected_bytes
from stages.artifacts.rendering import in_mib, in_millions
from stages.assemble.config import AssembleConfig

# Neurons of an expert: kernels need at least 64, and larger experts lose more quality. Widths are multiples of 8.
EXPERT_WIDTH, WIDTH_STEP = 64, 8
POOL_EXPERTS, POOL_EXPERT_WIDTH = 100, 256


@dataclass(frozen=True)
class ShapeRequest:
    """The shape that the user requested; None is filled in from the source's FFN width.

    Advice reads `assemble` and `source`; dense layers read `source` only.
    """

    experts: int | None
    n: int | None
    top_k: int | None
    always_on: int | None
    active: float
    topology: str = PER_LAYER
    assemble: AssembleConfig = field(default_factory=AssembleConfig)
    source: Decoder = None  # type: ignore[assignment]  # `resolve_shape` does not read it
    dense_layers: tuple[int, ...] = ()

    @property
    def pooled(self) -> bool:
        """Whether all layers share one pool of experts."""
        return self.topology != PER_LAYER

    @property
    def width(self) -> int:
        """F of the source."""
        return self.source.width

    @property
    def layers(self) -> int:
        """L of the source."""
        return self.source.depth

    @property
    def carved_share(self) -> float:
        """The active share of a carved layer: the average over all layers, dense ones included, is `active`."""
        if not (dense := len(self.dense_layers)):
            return self.active
        lacking = self.source.lacking
        return (self.active * (self.layers - lacking) - (dense - lacking)) / max(1, self.layers - dense)

    def target(self, shape: MoEShape) -> MoETarget:
        """The architecture of the carved model. Raises ConfigError: it cannot express this source or shape."""
        return select_target(self.source, self.assemble.target, shape)

    def count(self, shape: MoEShape) -> ParameterCount:
        """Parameters of the carved model. Raises ConfigError, as `target` does."""
        assemble = self.assemble
        return count_carved(self.source, self.target(shape), shape, assemble.pad_to, tied=assemble.tied_embeddings)


def resolve_shape(dials: ShapeRequest, width: int) -> MoEShape:
    """Fill in the missing dials, so that on average over the layers about `active`·F neurons serve each token.

    Experts: see `fill_experts`. With neither top_k nor always_on given:

    - Experts do not cover the FFN (E·N < F): the other neurons are always on, so each neuron has one place, and top_k
      is the largest that fits: of the ways to fill a layer of Qwen2.5-Coder-0.5B, this lost least.
    - Experts cover the FFN exactly, or fewer than 2 would fit with all other neurons always on: experts get half of the
      active width, always-on neurons the other half. top_k is the largest power of two (a folded scale then is exact in
      bf16) that fits, at least 2 if 2 fit, at most half of the experts. Neurons without a place are dropped.
    - Experts overlap (E·N > F): top_k is 1, since neurons shared by several chosen experts would be computed twice.

    With top_k given, always-on neurons fill the active width. With always_on given, experts fill it: as many as fit, or
    half of them if all would fit. A pool chooses a power of two of its experts and has no always-on neurons by default,
    since each layer's own always-on neurons would be the larger part of the model.
    """
    experts, n = fill_experts(dials, width)
    active, top_k, always_on = round(dials.carved_share * width), dials.top_k, dials.always_on
    if dials.pooled:
        always_on = always_on or 0
        if top_k is None:
            top_k = min(max(2, largest_power_of_two((active - always_on) // n)), experts)
    elif top_k is not None:
        always_on = max(0, active - top_k * n) if always_on is None else always_on
    elif always_on is not None:
        fitting = (active - always_on) // n
        top_k = max(1, fitting if fitting < experts else experts // 2)
    else:
        top_k, always_on = _fill_both(experts, n, active, width)
    return MoEShape(experts, n, top_k, always_on, dials.topology, dials.dense_layers)


def _fill_both(experts: int, n: int, active: int, width: int) -> tuple[int, int]:
    rest = width - experts * n
    if 0 < rest <= active - 2 * n:
        return (active - rest) // n, rest
    if rest < 0:
        top_k = 1
    else:
        fitting = max(largest_power_of_two(active // 2 // n), min(2, active // n))
        top_k = max(1, min(fitting, experts // 2))
    return top_k, max(0, active - top_k * n)


def fill_experts(dials: ShapeRequest, width: int) -> tuple[int, int]:
    """Number and width of the experts.

    Without a given number, experts hold the neurons that are not always on (`_share_always_on`). With a given number
    but no width, each gets an equal part of them. The default width is 64, or less if four experts of 64 do not fit the
    active width.
    """
    if dials.pooled:
        return dials.experts or POOL_EXPERTS, dials.n or POOL_EXPERT_WIDTH
    active, always_on = round(dials.carved_share * width), dials.always_on
    n = dials.n or min(EXPERT_WIDTH, max(1, largest_power_of_two(active // 4)))
    if always_on is None and dials.top_k is not None and dials.experts is None:
        always_on = max(0, active - dials.top_k * n)
    if always_on is None:
        routed = width * (1 - _share_always_on(dials.active, dials.carved_share))
    else:
        routed = max(1, width - always_on)
    if dials.experts is not None:
        return dials.experts, dials.n or _round_to_step(routed / dials.experts, width // dials.experts)
    least = 2 - (active - width) // n  # beside all other neurons, which then are always on, two experts fit
    fitting = max(least, round(routed / n)) if always_on is None else int(routed // n)
    return max(1, min(fitting, width // n)), n


def _share_always_on(active: float, carved: float) -> float:
    """Default share of a layer's neurons that are always on, from the active shares of all layers and of a carved one.

    Near what lost least in layers of Qwen2.5-Coder-0.5B with two dense layers: 0.24 at a half, 0.47 at three quarters.
    """
    return min(active * (0.18 + 0.6 * active), carved * (0.3 + 0.5 * carved))


def _round_to_step(n: float, at_most: int) -> int:
    """The multiple of 8 closest to n and at most `at_most`; a smaller number if there is none."""
    stepped = round(n / WIDTH_STEP) * WIDTH_STEP
    if stepped > at_most:
        stepped -= WIDTH_STEP
    return stepped or max(1, min(round(n), at_most))


def largest_power_of_two(bound: int) -> int:
    """The largest power of two <= bound, or 0."""
    return 1 << (bound.bit_length() - 1) if bound > 0 else 0


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
    where = f"setting dense_layers={[*asked]}" + ", narrow layers included" * bool(request.source.narrow)
    if unknown := [layer for layer in asked if not 0 <= layer < layers]:
        what = f"no layer {', '.join(map(str, unknown))}: the model has {layers}"
        yield ConfigError(what, where=where, do="dense_layers=[]")
    elif asked and request.pooled:
        do = "topology=per_layer" if request.source.narrow else "dense_layers=[]"
        yield ConfigError("a pool serves every layer: none stays dense", where=where, do=do)
    elif asked and len(asked) == layers:
        yield ConfigError(f"all {layers} layers dense: none is left to carve", where=where, do="dense_layers=[]")
    elif asked and request.carved_share <= 0 and None in (request.experts, request.n, request.top_k, request.always_on):
        what = f"{len(asked)} of {layers} layers dense leave nothing of active={request.active:g} to the others"
        lacking = request.source.lacking
        least = (len(asked) - lacking) / (layers - lacking)
        yield ConfigError(what, where=where, do=f"active above {least:.2f}" if lacking else "dense_layers=[]")


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


def shape_text(request: ShapeRequest, shape: MoEShape | None, model: str) -> str:
    """The source, the shape and its costs."""
    source = f"{model}: {request.layers} layers of {request.width} neurons"
    if shape is None:
        return source
    experts = f"{shape.experts} experts of {shape.n}{' in all, shared by every layer' if shape.pooled else ''}"
    first = f"{source} -> {experts}, {shape.top_k} per token, and {shape.always_on} always on"
    return "\n".join([first, *(f"  {line}" for line in describe_shape(request, shape))])


def weakness_text(request: ShapeRequest, shape: MoEShape | None) -> str:
    """The shape's weaknesses, and better settings; empty if it has none."""
    if shape is None or not (warnings := [*shape_warnings(request, shape)]):
        return ""
    remedy = find_remedy(request)
    return "\n".join([*warnings, *([f"  do:    {remedy}"] if remedy else [])])


def find_remedy(request: ShapeRequest) -> str | None:
    """Settings of a shape without weaknesses, ready to paste: the default of the first target that can hold it."""
    target, pad_to = request.assemble.target, request.assemble.pad_to
    # Half of the dense FFNs' neurons; by default a pool is as large for every model.
    pool = request.layers * request.width // 2
    # active=1 saves nothing.
    active = request.active if request.active < 1 else 0.5
    # Experts padded to more than their width may be too many.
    sizes = [EXPERT_WIDTH if request.pooled else None, pad_to]
    for name, n in product(dict.fromkeys([target, "auto", "tiny_onn"]), sizes):
        experts = max(1, pool // n) if request.pooled and n else None
        assemble = replace(request.assemble, target=name)
        tried = replace(request, experts=experts, n=n, top_k=None, always_on=None, active=active, assemble=assemble)
        shape = resolve_shape(tried, request.width)
        if _is_good(tried, shape):
            words = [f"experts={shape.experts}"] * (shape.experts != request.experts)
            words += [f"n={shape.n}"] * (shape.n != request.n)
            words += [f"top_k={shape.top_k}", f"always_on={shape.always_on}"]
            return " ".join([*words, *[f"assemble.target={name}"] * (name != target)])
    return None


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
    kept = ", ".join(str(layer) for layer in shape.dense_layers if request.source.has_ffn(layer))
    share, narrow = shape.active_share(request.width, request.layers, request.source.lacking), request.source.narrow
    few = [width for width in narrow.values() if width]
    why = f" ({len(few)} are too narrow, with {min(few):,})" if few else ""
    lines = [f"dense       layers {kept} keep all neurons{why}: {share:.0%} active on average"] if kept else []
    if without := [*narrow.values()].count(0):
        lines.append(f"no FFN      in {without} of {request.layers} layers")
    lines += [
        f"neurons     {active:,} of {request.width:,} serve a token ({active / request.width:.0%} active), "
        f"{routed:,} of them chosen for it ({routed / active:.0%} routed)",
        f"parameters  {in_millions(carved.total)} ({carved.total / dense.total:.2f} x the dense model's "
        f"{in_millions(dense.total)}), {in_millions(carved.active)} active per token "
        f"({carved.active / dense.active:.2f} x)",
    ]
    if request.source.tied and not request.assemble.tied_embeddings:
        head = in_millions(request.source.vocabulary * request.source.hidden)
        lines.append(f"            {head} of these are the output embedding, in the dense model the input's")
    size = expected_bytes("assemble", request.source, shape, request.assemble)
    tied = request.source.tied and request.assemble.tied_embeddings
    served, could = (_served(request, shape, tied=one) for one in (tied, False))
    untied = [name for name in could if name not in served]
    fewer = replace(resolve_shape(replace(request, always_on=0), request.width), dense_layers=shape.dense_layers)
    routed_alone = [name for name in _served(request, fewer, tied=tied) if name not in could]
    not_served = [name for name in RUNTIMES if name not in {*could, *routed_alone}]
    serving = f"{target.architecture}: {', '.join(['transformers', *served])}"
    serving += f"; {', '.join(untied)} with assemble.tied_embeddings=false" if untied else ""
    serving += f"; {', '.join(routed_alone)} with always_on=0" if routed_alone else ""
    serving += f"; not {', '.join(not_served)}" if not_served else ""
    return [*lines, f"checkpoint  about {in_mib(size)} on disk", f"serving     {serving}"]


def _served(request: ShapeRequest, shape: MoEShape, *, tied: bool) -> tuple[str, ...]:
    """The serving runtimes that compute a carve of this shape; () if its target cannot hold the shape."""
    if shape_faults(shape, request.width):
        return ()
    target, pad_to = request.target(shape), request.assemble.pad_to
    if check_target(request.source, target, shape):
        return ()
    return target.served_by(emit_text_config(request.source, target, shape, pad_to, tied=tied))
