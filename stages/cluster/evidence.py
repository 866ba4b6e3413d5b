"""What is known of one layer when its neurons are given roles and experts."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from models.config import ModelConfig
from models.shape import MoEShape
from stages.artifacts.statistics import NeuronStatistics, Scores
from stages.calibration.elimination import rank_by_alignment
from stages.cluster.activity import LayerActivity
from stages.cluster.config import ClusterConfig

FEATURES, GROUPING, LAYOUT, CONTROL = range(4)  # what a layer's streams of random numbers are for


@dataclass(frozen=True)
class LayerEvidence:
    """The layer's rows of all that earlier stages found, and its activity where the settings ask for a pass."""

    layer: int
    model: ModelConfig
    statistics: NeuronStatistics  # of all layers, as the scores
    scores: Scores | None  # None: nothing is ranked by score
    seed: int
    pass_activity: LayerActivity | None = None

    @property
    def activity(self) -> LayerActivity:
        """Inputs and activations on the calibration text, for what config.py names as streamed."""
        assert self.pass_activity is not None, "no pass was made: name what asked among the streamed in config.py"
        return self.pass_activity

    @property
    def score_F(self) -> Float[Tensor, "F"]:
        """What stage=score ranks the layer's neurons by, where config.py says that it is read."""
        assert self.scores is not None, "the score was not asked for: see reads_score in config.py"
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
    """What always-on neurons are the highest of, and what decides which of the others find a place in an expert.

    The same, but for a pool: its neurons are those of highest score, however its layers' always-on ones are chosen.
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
    # Without always-on neurons only those that find no slot need be told from the rest.
    keep = shape.always_on or shape.experts * shape.n
    return rank_by_alignment(activity.ffn, [activity.sample(cluster.sample_tokens)], keep)
