"""The cost of each stage: arithmetic, memory traffic and peak memory, as functions of sizes and settings.

T tokens; other letters as in `Sizes`. A product of (T, D) and (D, F) takes 2·T·D·F FLOPs. Starting the program and
reading text are not included. Formulas follow the default methods, and count a pool as if each layer had its experts.
"""

from collections.abc import Callable, Mapping
from math import ceil, inf

from pipeline.settings import Settings
from pipeline.workload import DRAWING, PROGRAM, Cost, Sizes, loaded_bytes, with_vocabulary
from stages.evaluate.config import PUBLISHED_TOKENS
from stages.text.config import sampled

VALIDATION = 1 / 8  # share of the calibration batches in the validation split
PENALTIES = 4  # of the five default ridge penalties, tried before the error rises
REGROUPINGS = 12  # rounds of partition and router, of at most 20
MEANS_ROUNDS = 12  # rounds of balanced k-means before them
DIRECTIONS = 64  # features of a neuron
STEP = 2048  # tokens per step of router training
BATCH = 4096  # tokens per batch of a layer pass, at most
LEAST_BATCHES = 16  # of a text
MEMO = 2**30  # bytes of features that an aligned baseline keeps


def attend(s: Sizes, tokens: float) -> Cost:
    """2·T·attention FLOPs, and 2·T·length·heads under the causal mask; about 20 passes over (T, D)."""
    return Cost(products=2 * tokens * (s.attention + s.length * s.heads), touched=4 * tokens * 20 * s.hidden)


def ffn(s: Sizes, tokens: float, width: int) -> Cost:
    """6·T·D·width FLOPs; activation and product make five passes over (T, width)."""
    return Cost(products=6 * tokens * s.hidden * width, touched=4 * tokens * 5 * width)


def head(s: Sizes, tokens: float) -> Cost:
    """2·T·D·V FLOPs; the loss makes about four passes over the logits."""
    return Cost(products=2 * tokens * s.hidden * s.vocabulary, touched=4 * tokens * 4 * s.vocabulary)


def forward(s: Sizes, tokens: float, width: int | None = None) -> Cost:
    """All layers and the head; FFNs of carved layers with `width` active neurons (default F)."""
    ffns = ffn(s, tokens, width or s.width) * s.carved + ffn(s, tokens, s.width) * s.dense
    return attend(s, tokens) * s.layers + ffns + head(s, tokens)


def scan(s: Sizes, settings: Settings) -> Cost:
    """Forward pass, a backward pass of equal cost (no weight gradients), and norms of each sample's gradients.

    Norms take min(2·length·(2D + 3F), 6·D·F) FLOPs per token and layer. Memory: the model, and see `Sizes.saved_bytes`.
    """
    tokens, batch = sampled(settings.data).tokens, settings.scan.read_batch("cpu" if s.on_host else "cuda")
    cost = forward(s, tokens)
    if settings.scan.gradients:
        norms = tokens * min(2 * s.length * (2 * s.hidden + 3 * s.width), 6 * s.hidden * s.width)
        # The top share of every token's neurons, bitmaps and sums.
        cost = cost * 2 + Cost(products=norms, touched=4 * tokens * 25 * s.width) * s.layers
    memory = loaded_bytes(s, settings) + s.saved_bytes(batch, s.width, settings.scan.gradient_checkpointing)
    written = s.layers * s.width * (settings.scan.reservoir_tokens // 8 + 64)
    return cost + Cost(tokens=tokens, read=s.parameters * s.stored, written=written, device=memory)


def score(s: Sizes, _settings: Settings) -> Cost:
    """Sorting F numbers per layer."""
    return Cost(touched=4000 * s.layers * s.width, read=64 * s.layers * s.width, written=32 * s.layers * s.width)


def layer_pass(s: Sizes, tokens: float, batch: int = BATCH) -> Cost:
    """Tokens through all layers, whose weights are read from the shards one layer at a time.

    Memory: two layers in fp32, a batch's activations (six times (T, F)), and hidden states unless they are on disk.
    """
    memory, kept = 2 * s.layer_bytes + 24 * min(batch, int(tokens) // LEAST_BATCHES) * s.width, s.kept_bytes(tokens)
    work = (attend(s, tokens) + ffn(s, tokens, s.width)) * s.layers
    passed = work + Cost(tokens=int(tokens), read=s.parameters * s.stored, device=memory)
    return passed + Cost(spilled=kept * s.processes) if kept > s.room else passed.add_memory(kept)


def ridge(tokens: float, inputs: int, outputs: int) -> Cost:
    """T·(2·inputs² + 2·inputs·outputs) FLOPs for moments, and a solve in fp64."""
    work, solve = 2 * tokens * inputs * (inputs + outputs), solve_flops(inputs, outputs)
    return Cost(products=work, solves=solve, device=solve_bytes(inputs, outputs))


def solve_bytes(inputs: int, outputs: int) -> int:
    """The upper half of the moments, the factor, and two right-hand sides, in fp64."""
    return 12 * inputs**2 + 16 * inputs * outputs


def solve_flops(inputs: int, outputs: int) -> float:
    """A Cholesky factorisation and two triangular solves."""
    return inputs**3 / 3 + 2 * inputs**2 * outputs


def cluster(s: Sizes, settings: Settings) -> Cost:
    """A pass of the dense model; features; the energy of U = F − S neurons on t tokens; rounds of partition and router.

    A round: 4·t·U·E + 4·t·D·E FLOPs and an assignment of U neurons to E experts. Memory: the pass, and t·(3·F + 2·U),
    or t·F and a regression on the S always-on neurons.
    """
    config, routed = settings.cluster, s.width - s.always_on
    tokens = with_vocabulary(sampled(settings.data).tokens, settings, s)
    few, kept = min(config.sample_tokens, tokens), settings.scan.reservoir_tokens
    passes = config.method == "router_aware" or config.always_on_by == "alignment"
    cost = layer_pass(s, tokens, config.batch_tokens) if passes else Cost()
    each = Cost(products=8 * s.width * kept * DIRECTIONS, touched=4 * s.width * kept)
    if config.method == "router_aware":
        each += ridge(few, s.always_on, routed).add_memory(4 * few * s.width) + ridge(few, s.hidden, 0)
        predicted = Cost(products=2 * few * s.always_on * routed, device=4 * few * (3 * s.width + 2 * routed))
        each += ffn(s, few, s.width) + predicted
        round_ = Cost(products=4 * few * s.experts * (routed + s.hidden), touched=24 * few * s.experts)
        each += round_ * REGROUPINGS
    if config.method in {"router_aware", "balanced_kmeans"}:
        each += Cost(cells=(REGROUPINGS + MEANS_ROUNDS) * routed * s.experts)
    if config.always_on_by == "alignment":
        each += ridge(few, s.width, 0) + Cost(products=2 * s.width**3)
    return cost.during(each * s.carved) + Cost(written=4 * s.carved * s.width) + draw(s, settings)


def draw(s: Sizes, settings: Settings) -> Cost:
    """The maps of stage cluster."""
    config = settings.cluster
    drawn = 0 if config.map == "none" else len(config.map_layers or range(min(3, s.carved)))
    return Cost(points=drawn * s.width, host=PROGRAM + DRAWING * bool(drawn))


def extract(s: Sizes, _settings: Settings) -> Cost:
    """Reading every FFN to carve; writing experts and always-on neurons."""
    ffn_bytes = 3 * s.hidden * s.width * s.stored
    return Cost(read=s.carved * ffn_bytes, written=s.carved * s.carved_weights * s.stored, device=2 * ffn_bytes)


def regression(s: Sizes, tokens: float) -> Cost:
    """A router by ridge regression: of routed on always-on neurons, then of each expert's residual on the input."""
    routed = min(s.experts * s.n, s.width - s.always_on)
    hidden = 4 * s.hidden * (s.always_on + routed) + 2 * s.always_on * routed
    work = Cost(products=tokens * hidden, touched=36 * tokens * routed)
    predicted = ridge(tokens, s.always_on, routed).add_memory(4 * tokens * s.width)
    return work + predicted + ridge(tokens, s.hidden, s.experts)


def descent(s: Sizes, tokens: float, steps: int) -> Cost:
    """A trained router: all experts' outputs once and their t·E² products, 2·t·E²·D FLOPs; then `steps` on batches."""
    if not steps:
        return Cost()
    outputs = ffn(s, tokens, s.experts * s.n) + Cost(
        products=2 * tokens * s.experts * s.hidden * (s.experts + 1), touched=12 * tokens * s.experts * s.hidden,
        device=int(4 * tokens * s.experts * (s.experts + 2)),
    )  # fmt: skip
    products, touched = s.experts * (4 * s.hidden + 2 * s.experts), 60 * s.experts + 4 * s.experts**2
    return outputs + Cost(products=STEP * products, touched=STEP * touched) * steps


def checkpoint(s: Sizes) -> Cost:
    """Reading the dense checkpoint and writing the MoE."""
    return Cost(read=s.parameters * s.stored, written=(s.parameters + max(0, s.added_weights)) * s.stored)


def assemble(s: Sizes, settings: Settings) -> Cost:
    """A pass of the dense model with every expert's contribution, 2·T·F·E FLOPs; a router per layer.

    Memory: the pass, and whichever is more: three times the activations (t, F) that a router is fitted on, these
    activations and a regression on the always-on neurons, or the overlaps of a trained router.
    """
    config = settings.assemble
    tokens = with_vocabulary(sampled(settings.data).tokens, settings, s)
    few = min(config.router_tokens, tokens)
    each = Cost(products=2 * tokens * s.experts * (s.width + 6 * s.hidden), touched=8 * tokens * s.width)
    each = each.add_memory(12 * few * s.width)
    if config.router != "random":
        each += regression(s, few)
    if config.router == "error":
        each += descent(s, few, config.router_steps)
    return layer_pass(s, tokens, config.batch_tokens).during(each * s.carved) + checkpoint(s)


def align(s: Sizes, tokens: float, penalties: float) -> Cost:
    """Down columns by ridge on the A active neurons: moments by blocks, a solve and a validation for each penalty."""
    fitted, held_out = tokens * (1 - VALIDATION), tokens * VALIDATION
    routed = s.experts * s.n
    moments = 2 * s.always_on * (s.always_on + routed) + s.top_k * s.n * routed + 2 * s.active * s.hidden
    solve = Cost(solves=solve_flops(s.width, s.hidden), touched=48 * s.width**2)
    blocks = Cost(touched=16 * fitted * s.width, products=fitted * moments, device=solve_bytes(s.width, s.hidden))
    return ffn(s, fitted, s.active) + blocks + solve * penalties + ffn(s, held_out, s.active) * (penalties + 1)


def project(s: Sizes, settings: Settings) -> Cost:
    """A pass of the carved model with the dense FFN's output at each layer; alignment, routers, gradient projection.

    A round of gradient projection: both models forward, and the carved model backward with the experts' gradients.
    Memory, whichever is more: the pass, its tokens and the fit of a layer (a solve, or four times its experts), or the
    dense model, five times the experts and a round's logits.
    """
    config = settings.project
    tokens = with_vocabulary(settings.data.tokens, settings, s)
    seen = min(config.refit_tokens, tokens) if config.rounds else tokens
    cost, fits = layer_pass(s, tokens, config.batch_tokens), Cost()
    if config.alignment == "ridge":
        each = align(s, seen, min(PENALTIES, len(config.penalties))) + ffn(s, tokens, s.active) * 2
        router = settings.assemble.router
        if config.rounds and router != "random" and s.top_k < s.experts:
            few = min(config.router_tokens, seen)
            steps = config.router_steps if router == "error" else 0
            each += (regression(s, few) + descent(s, few, steps) + align(s, seen, 1)) * config.rounds
            each += Cost(products=16 * seen * s.hidden * s.experts)
            if seen < tokens:
                each += align(s, tokens, PENALTIES - 1)
                each = each.add_memory(8 * seen * s.hidden)
        fits += each * s.carved
    if config.descent_steps:
        step = Cost(touched=4 * 12 * s.carved_weights, device=4 * 4 * s.carved_weights)
        fits += (ffn(s, config.descent_tokens, s.active) * 3 + step) * config.descent_steps * s.carved
    cost = cost.during(fits)
    if config.gradient_projection:
        cost += rounds(s, settings)
    return cost + checkpoint(s) + extract(s, settings)


def rounds(s: Sizes, settings: Settings) -> Cost:
    """Gradient projection, see `project`; the carved model is validated after every eighth of the rounds."""
    config, text = settings.project, settings.data.tokens
    tokens = min(config.gradient_tokens, (1 - VALIDATION) * text)
    tried = tokens * 9 / 8  # the first eighth is tried with two step lengths, on average
    experts = s.carved * s.carved_weights
    work = forward(s, tokens) + head(s, tried) + forward(s, tried, s.active) * 2.6
    work += Cost(touched=4 * tried * 8 * s.vocabulary)  # both distributions, computed again in the backward pass
    work += Cost(touched=4 * 12 * experts * tried / config.round_tokens)
    held_out = min(4096, text * VALIDATION)
    checked = forward(s, held_out, s.active) + head(s, held_out)
    logits = 4 * 2 * config.round_tokens * s.vocabulary
    return work + checked * 10 + Cost(device=4 * s.parameters + 20 * experts + logits)


def evaluate(s: Sizes, settings: Settings) -> Cost:
    """Both models and every baseline on held-out text; aligned baselines are also fitted on the calibration text.

    Memory, whichever is more: both models, or the hidden states of all baselines that fit in `room`, and features.
    """
    heldout, config = settings.data.heldout_tokens, settings.evaluate
    tokens = with_vocabulary(settings.data.tokens, settings, s)
    compared = (ffn(s, heldout, s.width) + Cost(products=2 * heldout * s.experts * s.n**2)) * s.carved
    cost = forward(s, heldout) + forward(s, heldout, s.active) + compared
    speed = min(config.speed_tokens, heldout)
    cost += (forward(s, speed) + forward(s, speed, s.active)) * bool(speed)
    cost += forward(s, config.layer_tokens, s.active) * (s.carved + 1) * bool(config.layer_tokens)
    moments, solves = s.active * (s.active + 2 * s.hidden), PENALTIES * solve_flops(s.active, s.hidden)
    fit = ffn(s, tokens, s.active) + Cost(products=tokens * (1 - VALIDATION) * moments, solves=solves)
    kept = features = 0
    for name in config.baselines:
        cost += layer_pass(s, heldout) + head(s, heldout)
        kept += s.kept_bytes(heldout)
        if name == "oracle":
            cost += Cost(products=2 * heldout * s.experts * s.n**2, touched=8 * heldout * s.width) * s.carved
        if name in PUBLISHED_TOKENS:
            cost += layer_pass(s, min(settings.data.tokens, PUBLISHED_TOKENS[name]))
        if name.endswith("_aligned"):
            cost += layer_pass(s, tokens) + fit * s.carved
            kept += s.kept_bytes(tokens)
            features = min(MEMO, 4 * tokens * s.active)
    both = 2 * loaded_bytes(s, settings, quantized=False) + 8 * config.batch_tokens * s.vocabulary
    spilled = int(max(0.0, kept - s.room))
    passing = kept - spilled + features + 3 * s.layer_bytes + 24 * BATCH * s.width
    return cost + Cost(tokens=heldout, spilled=spilled * s.processes, device=max(both, passing))


def train(s: Sizes, settings: Settings) -> Cost:
    """Forward pass and a backward pass of twice its cost, on the active or all neurons; `train.logits`: a teacher.

    Held-out text is read by the dense model once, and by the carved model (and the teacher) before training, in each
    phase every `train.heldout_steps`, and at its end.
    Memory: weights, gradients and two moments in fp32, and see `Sizes.saved_bytes`.
    """
    config = settings.train
    numbers = s.parameters + s.added_weights
    width = s.always_on + s.experts * s.n if config.straight_through else s.active
    steps = config.tokens / (config.batch * s.length)
    cost = forward(s, config.tokens, width) * 3 + Cost(touched=4 * 10 * numbers * steps)
    if config.logits:
        cost += forward(s, config.tokens) + Cost(touched=24 * config.tokens * s.vocabulary)
    heldout = min(settings.data.heldout_tokens, config.heldout_sequences * s.length)
    shares = filter(None, (config.router_share, config.experts_share, config.all_share))
    every = -(-config.heldout_steps // config.log_steps) * config.log_steps or inf
    checks = 1 + sum(max(1, ceil(share * steps / every)) for share in shares)
    cost += forward(s, heldout) + (forward(s, heldout, width) + forward(s, heldout) * bool(config.logits)) * checks
    teacher = loaded_bytes(s, settings, quantized=False) if config.logits else 0
    saved = s.saved_bytes(config.micro_batch * s.length, width, config.gradient_checkpointing)
    return cost + checkpoint(s) + Cost(tokens=config.tokens, device=16 * numbers + saved + teacher)


def dump(s: Sizes, settings: Settings) -> Cost:
    """A few forward and backward passes; writing inputs, weights and gradients."""
    tokens = settings.dump.steps * settings.dump.batch_tokens
    written = 4 * s.parameters + 4 * tokens * s.layers * (12 * s.hidden + 4 * s.width)
    cost = forward(s, tokens) * (2 if settings.dump.gradients else 1)
    return cost + Cost(tokens=tokens, read=s.parameters * s.stored, written=written, device=loaded_bytes(s, settings))


_FORMULAS = (scan, score, cluster, extract, assemble, project, train, evaluate, dump)
COSTS: Mapping[str, Callable[[Sizes, Settings], Cost]] = {formula.__name__: formula for formula in _FORMULAS}
