"""Compare dense model, carved model and baselines on held-out text: losses, FFN by FFN, size and speed."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

import models.tiny_onn.register  # noqa: F401 - transformers then knows the project's own class
from instruments.device import rounded_products
from models.config import MoEShape
from models.ffn import DenseFFN, ffn_modules, watch_ffns
from models.loading import input_device
from models.routing import choose_experts, count_choices
from models.stream import LayerStream, StreamLayer
from models.structure import decoder_layers
from models.training import RouterWatch
from stages.artifacts.job import ALONE, Workers
from stages.calibration.alignment import AlignmentSettings, align_down
from stages.calibration.batches import TokenStream, passed_losses
from stages.calibration.token_memory import Keep, TokenMemory, as_it_is
from stages.evaluate.baselines import (
    CMOE_TOKENS,
    CarvedFFN,
    FactsOf,
    LayerFacts,
    carve_cmoe,
    expert_grams,
    output_norms,
    route,
    start_baseline,
)
from stages.evaluate.report import LayerResult
from stages.losses import MeanLoss, measure_losses
from stages.text.batches import TokenBatch, first_batches


@torch.no_grad()
def measure_speed(models: dict[str, PreTrainedModel], batches: Sequence[TokenBatch], tokens: int) -> dict[str, float]:
    """Prefill tokens per second of each model; the models alternate on every batch, so that drift affects all."""
    for model in models.values():
        time_forward(model, batches[0])
    seconds, seen = dict.fromkeys(models, 0.0), 0
    for batch in batches:
        for name, model in models.items():
            seconds[name] += time_forward(model, batch)
        seen += batch.tokens
        if seen >= tokens:
            break
    return {name: seen / spent for name, spent in seconds.items()}


def time_forward(model: PreTrainedModel, batch: TokenBatch) -> float:
    """Seconds of one forward pass, with the output embedding of the last token only."""
    device = input_device(model)
    begin = time.perf_counter()
    model(input_ids=batch.input_ids.to(device), use_cache=False, logits_to_keep=1)
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)  # not of the current device, which may be another GPU
    return time.perf_counter() - begin


def count_parameters(model: PreTrainedModel, shape: MoEShape) -> tuple[int, int]:
    """All parameters, and those active per token, as `ParameterCount`: without the experts that it is not routed to.

    A pool's experts are active, and counted, once in every layer.
    """
    # Of 4-bit weights, two elements are stored per byte.
    sizes = {name: (getattr(one, "quant_state", None) or one).shape.numel() for name, one in model.named_parameters()}
    text = (f"{decoder_layers(model)[0].rpartition('.')[0]}.", "lm_head.", "experts.")
    wrapped = model.config.get_text_config(decoder=True) is not model.config
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    total, experts = sum(sizes.values()), sum(size for name, size in sizes.items() if ".experts." in f".{name}")
    times = len(decoder_layers(model)[1]) if shape.pooled else 1
    embedding = model.get_input_embeddings().weight
    users = sum(parameter is embedding for _, parameter in model.named_parameters(remove_duplicate=False))
    if users > 1:  # the head has it, too
        tables.discard(id(embedding))
    unread = sum(
        sizes[name]
        for name, parameter in model.named_parameters()
        if id(parameter) in tables or (wrapped and not name.startswith(text))
    )
    return total, total - experts + experts * shape.top_k * times // shape.experts - unread


@dataclass
class LayerFidelity:
    """Sums over the tokens seen so far, on the carved model's own inputs."""

    load_E: Tensor
    grams_ENN: Tensor | None  # None in a global pool, whose experts are not those of one layer's neurons
    sums_3: Tensor  # missed and wanted energy, and choices that agree with the oracle's; nothing waits for them

    @classmethod
    def start(cls, facts: LayerFacts) -> "LayerFidelity":
        """Nothing seen yet."""
        load_E = torch.zeros(len(facts.neurons_EN), device=facts.router.rows_ED.device)
        grams_ENN = None if facts.shape.pooled else expert_grams(facts.ffn, facts.neurons_EN)
        return cls(load_E, grams_ENN, load_E.new_zeros(3, dtype=torch.float64))

    def add(
        self,
        facts: LayerFacts,
        x_BTD: Float[Tensor, "B T D"],
        output_BTD: Float[Tensor, "B T D"],
        rows_N: Int[Tensor, "N"],
        chosen_SK: Int[Tensor, "S K"],
    ) -> None:
        """Compare one batch with the dense FFN and with the oracle, which chooses the experts of largest output norm.

        `rows_N` are the tokens without padding, `chosen_SK` the model's own choices for all S = B·T positions:
        `facts.router` approximates a selection bias.
        `facts` are passed with each batch, because weights of a model larger than its device are not kept.
        """
        x_TD = x_BTD.flatten(0, 1)[rows_N]
        h_TF = facts.ffn.hidden(x_TD)
        wanted_TD = facts.ffn.output(h_TF)
        self.sums_3[0] += (wanted_TD - output_BTD.flatten(0, 1)[rows_N]).double().square().sum()
        self.sums_3[1] += wanted_TD.double().square().sum()
        chosen_TK = chosen_SK[rows_N]
        self.load_E += count_choices(chosen_TK, len(self.load_E))
        if self.grams_ENN is not None:
            best_TK = choose_experts(output_norms(self.grams_ENN, h_TF, facts.neurons_EN), facts.shape.top_k)
            self.sums_3[2] += (chosen_TK[:, :, None] == best_TK[:, None, :]).sum()

    def result(self, workers: Workers = ALONE) -> LayerResult:
        """The figures of the layer, from the sums of all workers."""
        sums = torch.cat([self.sums_3, self.load_E.double()]).cpu()
        workers.sum_(sums)
        missed, wanted, agreed = sums[:3].tolist()
        load_E = sums[3:].float()
        unused, imbalance = int((load_E == 0).sum()), float(load_E.max() / load_E.mean())
        error = missed / wanted if wanted else 0.0
        agreement = None if self.grams_ENN is None else agreed / float(load_E.sum())
        return LayerResult(error, agreement, imbalance, unused, (load_E / load_E.mean()).tolist())


def follow_ffns(
    dense: PreTrainedModel,
    carved: PreTrainedModel,
    batches: Sequence[TokenBatch],
    facts_of: FactsOf,
    shape: MoEShape,
    workers: Workers = ALONE,
) -> tuple[dict[str, MeanLoss], list[LayerResult]]:
    """Both models' losses, and every layer compared with the dense FFN on the same inputs; workers share batches.

    The dense weights are read again for every batch. This costs nothing for plain weights; of offloaded or quantised
    ones, only one layer is in memory at a time.
    """
    fidelities, ffns = dict[int, LayerFidelity](), ffn_modules(dense)
    read = iter(batches[workers.rank :: workers.world])
    carved_layers = [layer for layer in range(len(ffns)) if layer not in shape.dense_layers]
    rows_N: Tensor

    def on_ffn(layer: int, x_BTD: Tensor, output_BTD: Tensor) -> None:
        nonlocal rows_N
        if layer in shape.dense_layers:
            return
        if layer == carved_layers[0]:
            rows_N = next(read).rows(x_BTD.device)
        facts = facts_of(layer, DenseFFN.of(ffns[layer], x_BTD))
        if layer not in fidelities:
            fidelities[layer] = LayerFidelity.start(facts)
        chosen_SK = routings.pop().chosen_TK.to(x_BTD.device)
        fidelities[layer].add(facts, x_BTD, output_BTD, rows_N.to(x_BTD.device), chosen_SK)

    watch = RouterWatch(carved)
    with watch.collect() as routings, watch_ffns(carved, on_ffn):
        losses = measure_losses({"dense": dense, "carved": carved}, batches, workers)
    watch.remove()
    results = [LayerResult(0.0, 1.0, 1.0, 0, [1.0] * shape.experts)] * len(ffns)  # as of layers that stay dense
    for layer in carved_layers:
        unread = LayerFidelity(torch.zeros(shape.experts), None, torch.zeros(3))
        results[layer] = fidelities.get(layer, unread).result(workers)
    return losses, results


@contextmanager
def watch_states(model: PreTrainedModel, tokens: int, memory: TokenMemory | None) -> Iterator[list[Tensor]]:
    """A list that gets the states after the last layer of each forward pass, (B, T, D); of `tokens` in all."""
    states: list[Tensor] = []
    keep: Keep = as_it_is

    def on_layer(_layer: nn.Module, _inputs: object, output: Any) -> None:  # noqa: ANN401 - a tensor, or it and others
        nonlocal keep
        states_BTD: Tensor = output if isinstance(output, Tensor) else output[0]
        if memory and not states and states_BTD.device.type == "cpu":
            keep = memory.reserve(tokens * states_BTD.shape[-1] * states_BTD.element_size())
        states.append(keep(states_BTD))

    with decoder_layers(model)[1][-1].register_forward_hook(on_layer):
        yield states


ALIGNED = "_aligned"


@dataclass(frozen=True)
class Text:
    """Batches of both splits."""

    calibration: Sequence[TokenBatch]
    heldout: Sequence[TokenBatch]


class BaselineRun:
    """One baseline's pass through the layers, on both splits."""

    def __init__(
        self,
        name: str,
        stream: LayerStream,
        text: Text,
        settings: AlignmentSettings,
        workers: Workers,
        memory: TokenMemory | None,
    ) -> None:
        """Embed the splits; calibration text only if the baseline is fitted on its own hidden states."""
        self.method, self.aligned = name.removesuffix(ALIGNED), name.endswith(ALIGNED)
        self._settings = settings
        read = text.calibration
        if not self.aligned:
            text_only = [batch for batch in read if batch.is_text]
            read = first_batches(text_only, CMOE_TOKENS) if self.method == "cmoe" else []
        self.fitted = bool(read)
        self._calibration = TokenStream(stream, read, workers, memory)
        self.heldout = TokenStream(stream, text.heldout, workers, memory, exact=True)

    def step(self, layer: StreamLayer, facts: LayerFacts, start: Callable[[str], CarvedFFN], *, last: bool) -> None:
        """Fit the baseline on calibration inputs, then run the layer on both splits; the `last` on held-out text only.

        One that is not fitted takes `start` of its method.
        """
        self._calibration.enter(layer)
        inputs = self._calibration.inputs
        carved: Callable[[Tensor], Tensor] = layer.ffn
        if not facts.stays_dense:
            if self.method == "cmoe":
                baseline = route(*carve_cmoe(facts, inputs))
            else:
                baseline = start_baseline(self.method, facts, inputs) if self.fitted else start(self.method)
            if self.aligned:
                with rounded_products(on=["cpu"]):
                    wanted = [inputs.keep(layer.ffn(x_TD)) for x_TD in inputs]
                baseline = align_down(baseline, inputs, wanted, self._settings).carved
            carved = baseline
        if not last:
            self._calibration.leave(map(carved, inputs))
        self.heldout.enter(layer)
        self.heldout.leave(map(carved, self.heldout.inputs))


@torch.no_grad()
def run_baselines(
    names: Sequence[str],
    stream: LayerStream,
    text: Text,
    facts_of: FactsOf,
    settings: AlignmentSettings,
    replicated: bool,
    workers: Workers = ALONE,
    memory: TokenMemory | None = None,
    dense: Sequence[Tensor] = (),
) -> dict[str, MeanLoss]:
    """Held-out loss of every baseline, see `choice_of`; `_aligned` adds the ridge alignment of the carve.

    `dense` holds the (B, T, D) states that `watch_states` kept, for the distance from the dense model's predictions.

    If neurons are `replicated`, unaligned baselines need weights for copies, see `start_baseline`. They are computed
    on the inputs of the unaligned carve, in one pass for all baselines that are not fitted, whose inputs differ little.
    Memory: hidden states of every baseline, on both splits if it is fitted, and one layer.
    """
    runs = {name: BaselineRun(name, stream, text, settings, workers, memory) for name in names}
    counted = replicated and any(not run.fitted and run.method != "static_mask" for run in runs.values())
    cut = TokenStream(stream, text.calibration if counted else [], workers, memory)
    for index, layer in enumerate(tqdm(stream.layers(), total=stream.depth, desc="baselines", unit="layer")):
        facts, last = facts_of(index, layer.ffn), index == stream.depth - 1
        cut.enter(layer)
        start = cache(partial(start_baseline, facts=facts, inputs=cut.inputs))
        for run in runs.values():
            run.step(layer, facts, start, last=last)
        if not last:
            cut.leave(map(layer.ffn if facts.stays_dense else start("unaligned"), cut.inputs))
        del start  # with the inputs, before the next layer has its own
    return passed_losses({name: run.heldout for name, run in runs.items()}, stream, text.heldout, workers, dense)
