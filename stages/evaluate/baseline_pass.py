"""Run the baselines in one pass over the layers: fitted on calibration text, measured on held-out text."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from models.checkpoint.shards import ShardReader
from models.experts import ExpertWeights
from models.loading import is_offloaded
from models.stream import LayerStream, StreamLayer
from models.targets.config import MOE_TARGETS
from models.training import find_routers, selection_bias
from stages.artifacts.job import ALONE, Workers
from stages.calibration.alignment import AlignmentSettings, align_down
from stages.calibration.batches import TokenStream, layer_seed
from stages.calibration.share import Share
from stages.calibration.token_memory import TokenMemory
from stages.evaluate.baselines import (
    FIRST_SEED,
    MASKS,
    CarvedFFN,
    FactsOf,
    LayerFacts,
    Memo,
    route,
    start_baseline,
)
from stages.evaluate.config import PUBLISHED_TOKENS
from stages.evaluate.published import PUBLISHED, first_text
from stages.losses import MeanLoss, measure_loss
from stages.text.batches import TokenBatch

logger = logging.getLogger(__name__)

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
        reads_all = self.aligned or self.method == "best_mask"
        calibration = (
            text.calibration if reads_all else first_text(text.calibration, PUBLISHED_TOKENS.get(self.method, 0))
        )
        self.fitted = bool(calibration)
        self._calibration = TokenStream(stream, calibration, workers, memory)
        self.heldout = TokenStream(stream, text.heldout, workers, memory)

    def step(self, layer: StreamLayer, facts: LayerFacts, cut: Share, hidden: Memo, *, last: bool) -> None:
        """Fit the baseline on calibration inputs, then run the layer on both splits; the `last` on held-out text only.

        A baseline that is not fitted uses the inputs `cut` of the unaligned carve, whose activations are `hidden`.
        """
        self._calibration.enter(layer)
        inputs = self._calibration.inputs
        if facts.stays_dense:
            self.heldout.enter(layer)
            for tokens in (self._calibration, self.heldout):
                tokens.leave(map(layer.ffn, tokens.inputs))
            return
        hidden = Memo(layer.ffn.hidden) if self.fitted else hidden
        if self.method in PUBLISHED:
            baseline = route(*PUBLISHED[self.method](facts, inputs))
        else:
            baseline = start_baseline(self.method, facts, inputs if self.fitted else cut, hidden)
        carved = self._align(layer, baseline, hidden) if self.aligned else baseline
        if not last:
            self._calibration.leave(map(carved, inputs))
        self.heldout.enter(layer)
        self.heldout.leave(map(replace(baseline, down_DF=carved.down_DF), self.heldout.inputs))

    def _align(self, layer: StreamLayer, baseline: CarvedFFN, hidden: Memo) -> CarvedFFN:
        """The baseline with columns aligned like the carve's; activations are computed once per batch."""
        inputs, features, wanted = self._calibration.inputs, Memo(baseline.features), []
        for x_TD in inputs:
            h_TF = hidden(x_TD)
            hidden.forget(x_TD)
            wanted.append(inputs.keep(layer.ffn.output(h_TF)))
            features.keep(x_TD, baseline.from_hidden(x_TD, h_TF))
        return align_down(replace(baseline, features=features), inputs, wanted, self._settings).carved


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
) -> dict[str, MeanLoss]:
    """Held-out loss of every baseline, see `choice_of`; `_aligned` adds the ridge alignment of the carve.

    If neurons are `replicated`, unaligned baselines need weights for the copies, see `copies_scale`. They are computed
    on the inputs of the unaligned carve, in one pass for all baselines that are not fitted, whose inputs differ little.
    Memory: hidden states of every baseline, on both splits if it is fitted, one layer, and the values in `Memo`.
    """
    runs = {name: BaselineRun(name, stream, text, settings, workers, memory) for name in names}
    counted = replicated and any(not run.fitted and run.method not in MASKS for run in runs.values())
    cut = TokenStream(stream, text.calibration if counted else [], workers, memory)
    for index, layer in enumerate(tqdm(stream.layers(), total=stream.depth, desc="baselines", unit="layer")):
        facts, hidden, last = facts_of(index, layer.ffn), Memo(layer.ffn.hidden), index == stream.depth - 1
        cut.enter(layer)
        for run in runs.values():
            run.step(layer, facts, cut.inputs, hidden, last=last)
        if facts.stays_dense:
            cut.leave(map(layer.ffn, cut.inputs))
        elif not last:
            unaligned = start_baseline("unaligned", facts, cut.inputs, hidden)
            cut.leave(unaligned.from_hidden(x_TD, hidden(x_TD)) @ unaligned.down_DF.T for x_TD in cut.inputs)
    return {name: run.heldout.loss(stream, text.heldout) for name, run in runs.items()}


def read_pool(checkpoint: Path, device: torch.device) -> Callable[[int], ExpertWeights]:
    """Read a pool's checkpoint: layer → all experts and the layer's always-on neurons, fp32; the latter read on call.

    Memory: the pool.
    """
    target = MOE_TARGETS["tiny_onn"]
    assert target.packed_pool is not None, "the one target with a pool"
    gate_up, down = target.packed_pool
    with ShardReader(checkpoint) as reader:
        gate_END, up_END = reader.tensor(gate_up).to(device, torch.float32).chunk(2, dim=1)
        down_EDN = reader.tensor(down).to(device, torch.float32)

    def experts_of(layer: int) -> ExpertWeights:
        with ShardReader(checkpoint) as reader:
            names = target.shared_ffn(layer)
            if names[0] in reader.names:
                shared = [reader.tensor(name).to(device, torch.float32) for name in names]
            else:
                none_SD = gate_END.new_empty(0, gate_END.shape[2])
                shared = [none_SD, none_SD, none_SD.T]
        return ExpertWeights(gate_END, up_END, down_EDN, *shared)

    return experts_of


def run_pool_baselines(
    names: Sequence[str], assembled: PreTrainedModel, batches: Sequence[TokenBatch], seed: int, workers: Workers
) -> dict[str, MeanLoss]:
    """Held-out loss of unaligned and random_router; masks and oracles are defined only within one layer's neurons.

    `assembled` is the pool before projection; its routers are overwritten.
    """
    losses = {}
    if "unaligned" in names:
        losses["unaligned"] = measure_loss(assembled, batches, "unaligned", workers)
    if "random_router" in names and is_offloaded(assembled):
        logger.warning("baseline random_router is left out: the weights of an offloaded model cannot be replaced")
    elif "random_router" in names:
        draw_routers(assembled, seed)
        losses["random_router"] = measure_loss(assembled, batches, "randomly routed", workers)
    return losses


@torch.no_grad()
def draw_routers(model: PreTrainedModel, seed: int) -> None:
    """Replace each router by seeded normal rows of the same norm, which keeps the gates' variation."""
    for layer, router in enumerate(find_routers(model)):
        weight: Tensor = router.weight  # type: ignore[assignment]
        generator = torch.Generator().manual_seed(layer_seed(seed, FIRST_SEED + layer))
        rows_ED = torch.randn(weight.shape, generator=generator).to(weight)
        weight.copy_(rows_ED * (weight.norm() / rows_ED.norm()))
        if (bias_E := selection_bias(router)) is not None:
            bias_E.zero_()
