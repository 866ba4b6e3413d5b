"""All baselines in one pass over the layers: fitted on calibration text, measured on held-out text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

from models.stream import LayerStream, StreamLayer
from stages.calibration.alignment import AlignmentSettings, align_down
from stages.calibration.target import AlignmentTarget
from stages.calibration.token_stream import TokenStream
from stages.data.batches import TokenBatch
from stages.evaluate.baselines import LayerFacts, start_baseline
from stages.metrics.loss import MeanLoss

ALIGNED = "_aligned"


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
        fitted = self.aligned or replicated or self.method == "best_mask"
        calibration = text.calibration if fitted else []
        self._calibration = TokenStream(stream, calibration)
        self._heldout = TokenStream(stream, text.heldout)
        self._target = AlignmentTarget(settings.alignment_target if self.aligned else "local", stream, calibration)

    def step(self, layer: StreamLayer, facts: LayerFacts) -> None:
        """Fit on the calibration inputs, then pass the layer with both splits."""
        self._calibration.enter(layer)
        self._target.enter(layer, self._calibration)
        carved = start_baseline(self.method, facts, self._calibration.inputs)
        if self.aligned:
            carved = align_down(carved, self._calibration.inputs, self._target, self._settings).carved
        self._calibration.leave(map(carved, self._calibration.inputs))
        self._heldout.enter(layer)
        self._heldout.leave(map(carved, self._heldout.inputs))

    def loss(self, stream: LayerStream, text: Text) -> MeanLoss:
        """Held-out loss after the last layer."""
        return self._heldout.loss(stream, text.heldout)


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
        names: baselines, see `copies_of`; `_aligned` adds the ridge alignment of the carve.
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
            run.step(layer, facts)
    return {name: run.loss(stream, text) for name, run in runs.items()}
