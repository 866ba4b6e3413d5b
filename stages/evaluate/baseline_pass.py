"""All baselines in one pass over the layers: fitted on calibration text, measured on held-out text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

from models.stream import LayerStream, StreamLayer
from stages.calibration.alignment import AlignmentSettings, Target, align_down
from stages.calibration.target import AlignmentTarget
from stages.calibration.token_stream import TokenStream
from stages.data.batches import TokenBatch
from stages.evaluate.baselines import MASKS, Baseline, LayerFacts, start_baseline
from stages.evaluate.features import RememberedFFN
from stages.metrics.loss import MeanLoss

ALIGNED = "_aligned"
# Calibration tokens from which the weight of units with copies is counted, for baselines that nothing else is fitted
# of: their ratio of counts is then known to a percent, and the loss is flat about it.
COUNTED_TOKENS = 8192


@dataclass(frozen=True)
class Text:
    """Batches of both splits."""

    calibration: Sequence[TokenBatch]
    heldout: Sequence[TokenBatch]


class BaselineRun:
    """One baseline on its way through the layers, on both splits."""

    def __init__(
        self, name: str, stream: LayerStream, text: Text, settings: AlignmentSettings, *, replicated: bool
    ) -> None:
        """Embed the splits; calibration text only where something is fitted on it."""
        self.method, self.aligned = name.removesuffix(ALIGNED), name.endswith(ALIGNED)
        self._settings = settings
        calibration = self._choose_calibration(text.calibration, replicated=replicated)
        self._calibration = TokenStream(stream, calibration)
        self._heldout = TokenStream(stream, text.heldout)
        residual = self.aligned and settings.alignment_target == "residual"
        self._target = AlignmentTarget("residual", stream, calibration) if residual else None

    def _choose_calibration(self, batches: Sequence[TokenBatch], *, replicated: bool) -> Sequence[TokenBatch]:
        """All that is fitted on, the little that copies are counted on, or nothing."""
        if self.aligned or self.method == "best_mask":
            return batches
        return spread(batches, COUNTED_TOKENS) if replicated and self.method not in MASKS else []

    def step(self, layer: StreamLayer, facts: LayerFacts, *, last: bool) -> None:
        """Fit on the calibration inputs, then pass the layer with both splits; behind the last nothing is fitted."""
        self._calibration.enter(layer)
        inputs = self._calibration.inputs
        baseline = start_baseline(self.method, facts, inputs)
        carved = self._align(layer, facts, baseline) if self.aligned else baseline.carved
        if not last:
            self._calibration.leave(map(carved, inputs))
        self._heldout.enter(layer)
        plain = carved.carved if isinstance(carved, RememberedFFN) else carved
        self._heldout.leave(map(plain, self._heldout.inputs))

    def _align(self, layer: StreamLayer, facts: LayerFacts, baseline: Baseline) -> RememberedFFN:
        """The baseline with columns fitted as the carve's; of every batch activations are computed once."""
        inputs, remembered, wanted = self._calibration.inputs, RememberedFFN.of(baseline.carved), []
        for x_TD in inputs:
            h_TF = facts.ffn.hidden(x_TD)
            wanted.append(facts.ffn.output(h_TF) if self._target is None else h_TF.new_empty(0))
            remembered.remember(x_TD, baseline.features(x_TD, h_TF))
        target: Target = lambda index, _x: wanted[index]  # noqa: E731
        if self._target is not None:
            self._target.enter(layer, self._calibration)
            target = self._target
        return align_down(remembered, inputs, target, self._settings).carved

    def loss(self, stream: LayerStream, text: Text) -> MeanLoss:
        """Held-out loss after the last layer."""
        return self._heldout.loss(stream, text.heldout)


def spread(batches: Sequence[TokenBatch], tokens: int) -> list[TokenBatch]:
    """Batches at equal distances that hold about so many tokens; one at least."""
    total = sum(batch.tokens for batch in batches)
    return list(batches[:: max(1, total // tokens)])


@torch.no_grad()
def run_baselines(
    names: Sequence[str],
    stream: LayerStream,
    text: Text,
    facts_of: Callable[[int, StreamLayer], LayerFacts],
    settings: AlignmentSettings,
    *,
    replicated: bool,
) -> dict[str, MeanLoss]:
    """Held-out loss of every baseline.

    Args:
        names: baselines, see `choice_of`; `_aligned` adds the ridge alignment of the carve.
        stream: the dense model.
        text: both splits.
        facts_of: layer → what is known of it.
        settings: of the alignment.
        replicated: some units have copies, so that even unaligned baselines need a scale fitted.
    Memory: hidden states of every baseline, on both splits where it is fitted, and one layer.
    """
    runs = {name: BaselineRun(name, stream, text, settings, replicated=replicated) for name in names}
    for index, layer in enumerate(tqdm(stream.layers(), total=stream.depth, desc="baselines", unit="layer")):
        facts = facts_of(index, layer)
        for run in runs.values():
            run.step(layer, facts, last=index == stream.depth - 1)
    return {name: run.loss(stream, text) for name, run in runs.items()}
