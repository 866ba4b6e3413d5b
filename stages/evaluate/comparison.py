"""Compare dense and carved model, run by transformers, on held-out text."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

import models.tiny_onn.register  # noqa: F401 - transformers then knows the project's own class
from instruments.ffn_probe import GatedFFN
from models.config import ModelConfig, MoEShape
from models.ffn import DenseFFN, ffn_parts, watch_ffns
from models.loading import input_device, load_whole, placement, resolve_device
from models.routing import choose_experts
from models.training import RouterWatch
from stages.artifacts.job import ALONE, Workers
from stages.evaluate.baselines import FactsOf, LayerFacts, expert_grams, output_norms
from stages.evaluate.report import LayerResult
from stages.losses import MeanLoss, measure_loss
from stages.routing.task import error_drops
from stages.text.batches import TokenBatch


def load_carved(folder: Path, model: ModelConfig, dtype: torch.dtype, offload_folder: Path) -> PreTrainedModel:
    """Load the checkpoint, frozen, with the placement settings of the dense `model`.

    Weights that do not fit on the devices go to `offload_folder`: transformers joins experts while loading, so it could
    not read them later from the checkpoint's files.
    """
    return load_whole(
        folder,
        dtype=dtype,
        experts_implementation="grouped_mm",
        offload_folder=offload_folder,
        **placement(model, resolve_device(model)),
    )


@torch.no_grad()
def measure_speed(models: dict[str, PreTrainedModel], batches: Sequence[TokenBatch], tokens: int) -> dict[str, float]:
    """Prefill tokens per second of each model; the models alternate on every batch, so that drift affects all."""
    for model in models.values():
        time_forward(model, batches[0])
    seconds, seen = dict.fromkeys(models, 0.0), 0
    for batch in batches:
        for name, model in models.items():
            seconds[name] += time_forward(model, batch)
        seen += batch.input_ids.numel()
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
    """All parameters, and those active per token: without the experts that it is not routed to.

    A pool's experts are active, and counted, once in every layer.
    """
    sizes = {name: count_numbers(parameter) for name, parameter in model.named_parameters()}
    total, experts = sum(sizes.values()), sum(size for name, size in sizes.items() if ".experts." in f".{name}")
    times = model.config.num_hidden_layers if shape.pooled else 1
    return total, total - experts + experts * shape.top_k * times // shape.experts


def count_numbers(parameter: nn.Parameter) -> int:
    """Elements of a parameter's matrix; 4-bit elements are stored two per byte."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()


@dataclass
class LayerFidelity:
    """Sums over the tokens seen so far, on the carved model's own inputs."""

    top_k: int
    load_E: Tensor
    grams_ENN: Tensor | None  # None in a global pool, which uses the error oracle
    missed: float = 0.0
    wanted: float = 0.0
    agreed: int = 0
    chosen: int = 0

    @classmethod
    def start(cls, facts: LayerFacts) -> "LayerFidelity":
        """Nothing seen yet."""
        load_E = torch.zeros(len(facts.neurons_EN), device=facts.router.rows_ED.device)
        return cls(facts.shape.top_k, load_E, None if facts.pool else expert_grams(facts.ffn, facts.neurons_EN))

    def add(
        self,
        facts: LayerFacts,
        x_BTD: Float[Tensor, "B T D"],
        output_BTD: Float[Tensor, "B T D"],
        mask_BT: Bool[Tensor, "B T"],
        chosen_SK: Int[Tensor, "S K"],
    ) -> None:
        """Compare one batch with the dense FFN and with the oracle, see `oracle_name`.

        `chosen_SK` are the model's own choices for all S = B·T tokens: `facts.router` approximates a selection bias.
        `facts` are passed with each batch, because weights of a model larger than its device are not kept.
        """
        x_TD = x_BTD[mask_BT]
        h_TF = facts.ffn.hidden(x_TD)
        wanted_TD = facts.ffn.output(h_TF)
        self.missed += float((wanted_TD - output_BTD[mask_BT]).double().square().sum())
        self.wanted += float(wanted_TD.double().square().sum())
        chosen_TK = chosen_SK[mask_BT.flatten()]
        self.load_E += torch.bincount(chosen_TK.flatten(), minlength=len(self.load_E))
        if self.grams_ENN is not None:
            gains_TE = output_norms(self.grams_ENN, h_TF, facts.neurons_EN)
        else:
            assert facts.pool is not None, "see start"
            gains_TE = error_drops(facts.pool, x_TD.float(), wanted_TD.float())
        best_TK = choose_experts(gains_TE, self.top_k)
        self.agreed += int((chosen_TK[:, :, None] == best_TK[:, None, :]).sum())
        self.chosen += chosen_TK.numel()

    def result(self, workers: Workers = ALONE) -> LayerResult:
        """The figures of the layer, from the sums of all workers."""
        sums = torch.tensor([self.missed, self.wanted, self.agreed, self.chosen], dtype=torch.float64)
        sums = torch.cat([sums, self.load_E.cpu().double()])
        workers.sum_(sums)
        missed, wanted, agreed, chosen = sums[:4].tolist()
        load_E = sums[4:].to(self.load_E)
        unused, imbalance = int((load_E == 0).sum()), float(load_E.max() / load_E.mean())
        error = missed / wanted if wanted else 0.0
        return LayerResult(error, agreed / chosen, imbalance, unused, (load_E / load_E.mean()).tolist())


def follow_ffns(
    carved: PreTrainedModel,
    batches: Sequence[TokenBatch],
    dense: Sequence[GatedFFN],
    facts_of: FactsOf,
    shape: MoEShape,
    workers: Workers = ALONE,
) -> tuple[MeanLoss, list[LayerResult]]:
    """The carved model's loss, and every layer compared with the dense FFN on the same inputs; workers share batches.

    The dense weights are read again for every batch. This costs nothing for plain weights; of offloaded or quantised
    ones, only one layer is in memory at a time.
    """
    fidelities: dict[int, LayerFidelity] = {}
    masks = iter([batch.attention_mask.bool() for batch in batches[workers.rank :: workers.world]])
    mask_BT: Tensor

    def on_ffn(layer: int, x_BTD: Tensor, output_BTD: Tensor) -> None:
        nonlocal mask_BT
        if layer == 0:
            mask_BT = next(masks)
        if layer in shape.dense_layers:
            return
        facts = facts_of(layer, DenseFFN.of(dense[layer], x_BTD))
        if layer not in fidelities:
            fidelities[layer] = LayerFidelity.start(facts)
        chosen_SK = routings.pop().chosen_TK.to(x_BTD.device)
        fidelities[layer].add(facts, x_BTD, output_BTD, mask_BT.to(x_BTD.device), chosen_SK)

    watch = RouterWatch(carved)
    with watch.collect() as routings, watch_ffns(carved, on_ffn):
        loss = measure_loss(carved, batches, "carved", workers)
    watch.remove()
    results = [LayerResult(0.0, 1.0, 1.0, 0, [1.0] * shape.experts)] * len(dense)  # as of layers that stay dense
    for layer in range(len(dense)):
        if layer not in shape.dense_layers:
            fidelity = fidelities.get(layer) or LayerFidelity(shape.top_k, torch.zeros(shape.experts), None)
            results[layer] = fidelity.result(workers)
    return loss, results


def measure_layers(
    carved: PreTrainedModel,
    batches: Sequence[TokenBatch],
    dense: PreTrainedModel,
    layers: Sequence[int],
    workers: Workers = ALONE,
) -> dict[int, float]:
    """Fall of the carved model's loss, nats per token, if one of the layers gets its dense FFN back."""
    carve = measure_loss(carved, batches, workers=workers).nats
    saved = {}
    for layer in tqdm(layers, desc="layers put back", unit="layer"):
        with dense_again(carved, layer, dense.get_decoder().layers[layer].mlp):
            saved[layer] = carve - measure_loss(carved, batches, workers=workers).nats
    return saved


@contextmanager
def dense_again(carved: PreTrainedModel, layer: int, ffn: nn.Module) -> Iterator[None]:
    """Replace the output of a layer's experts by that of the dense FFN."""
    first, *others = ffn_parts(carved.get_decoder().layers[layer])

    def instead(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> object:
        dense: Tensor = ffn(args[0])
        return (dense, *output[1:]) if isinstance(output, tuple) else dense

    def nothing(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        return torch.zeros_like(output)

    with ExitStack() as hooks:
        hooks.callback(first.register_forward_hook(instead).remove)
        for other in others:
            hooks.callback(other.register_forward_hook(nothing).remove)
        yield
