"""All that is known of a layer when its neurons are grouped: statistics, scores, activity on the calibration text."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from models.config import ModelConfig, MoEShape
from models.ffn import DenseFFN
from models.loading import load_tokenizer, resolve_device
from models.source import resolve_folder
from models.stream import LayerStream
from stages.artifacts.statistics import NeuronStatistics, Scores
from stages.calibration.batches import calibration_batches, evenly_spaced
from stages.calibration.config import VocabularyConfig
from stages.calibration.elimination import rank_by_alignment
from stages.calibration.token_stream import TokenStream
from stages.cluster.config import ClusterConfig
from stages.text.config import DataConfig
from stages.text.sequences import TokenBatch


@dataclass(frozen=True)
class LayerActivity:
    """One layer's FFN and its inputs, (T, D) for every batch, real tokens only; valid until the next layer comes."""

    ffn: DenseFFN
    inputs: Sequence[Tensor]

    @property
    def tokens(self) -> int:
        """T of all batches."""
        return sum(map(len, self.inputs))

    def sample(self, tokens: int) -> Float[Tensor, "T D"]:
        """At most `tokens` of the inputs, evenly spaced over the text."""
        x_TD = torch.cat(list(self.inputs))
        return x_TD[evenly_spaced(len(x_TD), tokens)]


@contextmanager
def open_activities(
    model: ModelConfig, data: DataConfig, vocabulary: VocabularyConfig, batch_tokens: int
) -> Iterator[Iterator[LayerActivity]]:
    """One pass of the dense model over the calibration text: the activity of every layer in order.

    Memory: the hidden states of all tokens and one layer.
    """
    folder = resolve_folder(model)
    batches = calibration_batches(data, vocabulary, load_tokenizer(folder), batch_tokens)
    with LayerStream(folder, device=resolve_device(model)) as stream:
        yield stream_activities(stream, batches)


def stream_activities(stream: LayerStream, batches: Sequence[TokenBatch]) -> Iterator[LayerActivity]:
    """The activity of every layer in order; asking for the next one passes this one's FFN."""
    tokens = TokenStream(stream, batches)
    for layer in stream.layers():
        tokens.enter(layer)
        yield LayerActivity(layer.ffn, tokens.inputs)
        tokens.leave(map(layer.ffn, tokens.inputs))


FEATURES, GROUPING, LAYOUT, CONTROL = range(4)  # what a layer's streams of random numbers are for


@dataclass(frozen=True)
class LayerEvidence:
    """A layer's statistics and scores, and its activity where the settings ask for a pass."""

    layer: int
    model: ModelConfig
    statistics: NeuronStatistics  # of all layers, as the scores
    scores: Scores | None  # None: nothing is ranked by score
    seed: int
    pass_activity: LayerActivity | None = None

    @property
    def activity(self) -> LayerActivity:
        """Inputs on the calibration text, where `needs_pass` in config.py says so."""
        assert self.pass_activity is not None, "no pass was made, see needs_pass in config.py"
        return self.pass_activity

    @property
    def score_F(self) -> Float[Tensor, "F"]:
        """Scores of the layer's neurons, where `reads_score` in config.py says so."""
        assert self.scores is not None, "no score was read, see reads_score in config.py"
        return self.scores.chosen[self.layer]

    @property
    def contribution_F(self) -> Float[Tensor, "F"]:
        """Mean |h|·‖d‖."""
        return self.statistics.contribution[self.layer]

    def draw(self, purpose: int) -> np.random.Generator:
        """Random numbers of this layer and purpose alone, from their beginning."""
        return np.random.default_rng((self.seed, self.layer, purpose))


def rank_neurons(
    cluster: ClusterConfig, evidence: LayerEvidence, shape: MoEShape
) -> tuple[Float[Tensor, "F"], Float[Tensor, "F"]]:
    """Criteria for choosing the always-on neurons, and for dropping others where experts have no room.

    They differ in a pool only: its neurons are those of highest score, also where alignment chooses the always-on ones.
    """
    width = evidence.statistics.sum_abs.shape[1]
    if not cluster.ranks(shape, width) and not shape.pooled:
        flat_F = torch.zeros(width)
        return flat_F, flat_F
    measure_F = align(cluster, evidence, shape) if cluster.aligns(shape, width) else evidence.score_F
    return measure_F, evidence.score_F if shape.pooled else measure_F


def align(cluster: ClusterConfig, evidence: LayerEvidence, shape: MoEShape) -> Float[Tensor, "F"]:
    """The order in which the aligned output can do without neurons."""
    activity = evidence.activity
    # Without always-on neurons only the dropped ones have to be told apart.
    keep = shape.always_on or shape.experts * shape.n
    return rank_by_alignment(activity.ffn, [activity.sample(cluster.sample_tokens)], keep)
