"""The partition of one layer, the data it is made from, and each layer's share of a pool's experts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from instruments.errors import ConfigError
from models.config import MoEShape
from models.ffn import DenseFFN
from stages.artifacts.carve import NeuronStatistics, Partition, Scores
from stages.cluster import methods

FEATURES, GROUPING, LAYOUT = range(3)  # purposes of a layer's random number streams

Activity = tuple[DenseFFN, Tensor]  # a layer's FFN and some of its inputs, (T, D)


@dataclass(frozen=True)
class LayerEvidence:
    """A layer's statistics and scores, and its activity if the settings need a pass."""

    layer: int
    statistics: NeuronStatistics  # of all layers, like the scores
    scores: Scores | None  # None: nothing is ranked by score
    seed: int
    device: torch.device  # computes with the activation bits and the activity
    activity: Activity | None = None  # on the calibration text; None: no pass was made

    @property
    def score_F(self) -> Float[Tensor, "F"]:
        """Scores of the layer's neurons; only if `reads_score` in config.py is true."""
        assert self.scores is not None, "no score was read, see reads_score in config.py"
        return self.scores.chosen[self.layer]

    @property
    def contribution_F(self) -> Float[Tensor, "F"]:
        """Mean |h|·‖d‖."""
        return self.statistics.contribution[self.layer]

    def draw(self, purpose: int) -> np.random.Generator:
        """A new generator, seeded by layer and purpose."""
        return np.random.default_rng((self.seed, self.layer, purpose))


def view_neurons(evidence: LayerEvidence) -> Float[Tensor, "F C"]:
    """Features of a layer's neurons, from the tokens on which they fire, computed on the device.

    Raises:
        ConfigError: the scan did not keep activation bits.
    """
    tokens = evidence.statistics.reservoir_tokens
    if not tokens:
        what, where = "the scan kept no activation bitmaps to compare neurons by", "stage=cluster"
        raise ConfigError(what, where=where, do="scan.reservoir_tokens=4096")
    bits_FR = methods.unpack_bits(evidence.statistics.active_bits[evidence.layer].to(evidence.device), tokens)
    # Up to the projection, the cosine of two rows is |i∩j| / √(|i|·|j|) of the tokens on which the neurons fire.
    return methods.project_on_top_directions(bits_FR, methods.FEATURE_DIMS, evidence.draw(FEATURES)).cpu()


def layer_shapes(shape: MoEShape, scores_LF: Float[Tensor, "L F"]) -> list[MoEShape]:
    """Each layer's share of the pool's experts, as the shape by which the layer's own neurons are grouped.

    Shares are proportional to the layers' counts among the E·N highest scores, see `count_best`. A layer of e experts
    is grouped as if a token chose among these alone: K of them, but at most half, because all groupings are equally
    good if all experts are chosen. An expert holds no neuron twice. Neurons are copied only if the pool has more
    places than the model has neurons.
    """
    layers, width = scores_LF.shape
    most = max((width - shape.always_on) // shape.n, -(-shape.experts // layers))
    given_L = share_experts(
        count_best(scores_LF, shape.experts * shape.n, shape.always_on).double(),
        shape.experts,
        least=min(1, shape.experts // layers),
        most=most,
    )
    counts = map(int, given_L.tolist())
    return [replace(shape, experts=given, top_k=max(1, min(shape.top_k, given // 2))) for given in counts]


def count_best(scores_LF: Float[Tensor, "L F"], slots: int, always_on: int = 0) -> Int[Tensor, "L"]:
    """Count each layer's neurons among the `slots` highest scores behind those that are always on, standardised.

    Scores are comparable within one layer only. Ranks would give every layer the same count; standard deviations
    distinguish a layer with few outstanding neurons from one with many.
    """
    deviation_L1 = scores_LF.std(1, keepdim=True).clamp_min(torch.finfo(scores_LF.dtype).tiny)
    above_LF = (scores_LF - scores_LF.mean(1, keepdim=True)) / deviation_L1
    above_LF = above_LF.scatter(1, above_LF.topk(always_on).indices, -torch.inf)
    best = above_LF.flatten().argsort(descending=True, stable=True)[:slots]
    counts_L: Tensor = (best // scores_LF.shape[1]).bincount(minlength=len(scores_LF))
    return counts_L


def share_experts(weights_L: Float[Tensor, "L"], experts: int, *, least: int, most: int) -> Int[Tensor, "L"]:
    """Distribute E experts over the layers in proportion to weights >= 0, `least` to `most` experts per layer.

    E is between L·least and L·most; ties go to the lower layer.
    Source: Sainte-Laguë's highest quotients.
    """
    given_L = torch.full((len(weights_L),), least)
    for _ in range(experts - int(given_L.sum())):
        quotient_L = torch.where(given_L < most, weights_L / (2 * given_L + 1), -1.0)
        given_L[quotient_L.argmax()] += 1
    return given_L


ALWAYS_ON, DROPPED = -1, -2  # homes of neurons that no expert holds


def split_neurons(
    scores_F: Float[Tensor, "F"], *, always_on: int, slots: int
) -> tuple[Int[Tensor, "S"], Int[Tensor, "U"], Int[Tensor, "X"]]:
    """Always-on neurons (the S of highest score), routed ones (the next `slots`), and dropped ones.

    `slots` is the number of places in experts, E·N. Ties go to the lower index; the results ascend.
    """
    best_F = scores_F.argsort(descending=True, stable=True)
    routed = best_F[always_on : always_on + slots]
    return best_F[:always_on].sort().values, routed.sort().values, best_F[always_on + slots :].sort().values


@dataclass(frozen=True)
class LayerPartition:
    """Every neuron in one of three roles, and the neurons of every expert; indices ascend."""

    always_on_S: Int[Tensor, "S"]
    routed_U: Int[Tensor, "U"]
    dropped_X: Int[Tensor, "X"]
    labels_U: Int[Tensor, "U"]  # the expert that each routed neuron was grouped into, before copies
    neurons_EN: Int[Tensor, "E N"]

    @property
    def home_F(self) -> Int[Tensor, "F"]:
        """The expert of every neuron, ALWAYS_ON or DROPPED."""
        home_F = torch.full((len(self.always_on_S) + len(self.routed_U) + len(self.dropped_X),), DROPPED)
        home_F[self.always_on_S] = ALWAYS_ON
        home_F[self.routed_U] = self.labels_U
        return home_F


def save_partition(
    folder: Path, partitions: Mapping[int, LayerPartition], layers: int, shape: MoEShape, width: int, description: str
) -> None:
    """Write all layers as one `Partition`; of the `layers`, those without a partition stay dense."""
    always_on_LS = torch.zeros(layers, shape.always_on, dtype=torch.int32)
    neurons = [torch.empty(0, shape.n, dtype=torch.int32)] * layers
    for layer, partition in partitions.items():
        always_on_LS[layer] = partition.always_on_S
        neurons[layer] = partition.neurons_EN.int()
    home_P = torch.arange(layers, dtype=torch.int32).repeat_interleave(torch.tensor([*map(len, neurons)]))
    Partition(width, torch.cat(neurons), home_P, always_on_LS, shape.pooled, description).save(folder)


def partition_layer(
    scores_F: Float[Tensor, "F"],
    features: Callable[[], Float[Tensor, "F C"]],
    shape: MoEShape,
    *,
    method: methods.Method,
    rng: np.random.Generator,
    activity: Activity | None = None,
) -> LayerPartition:
    """Choose the always-on neurons, group the others into experts, and fill the experts to N neurons each.

    `scores_F` ranks neurons to be always on, dropped, or dealt out by method rank. `features` is called only by methods
    that compare neurons; only router_aware reads `activity`. `shape` has N ≤ F − S; in a pool it comes from
    `layer_shapes`.

    Returns:
        Indices into the layer's F neurons, ascending within every expert.
    """
    roles = split_neurons(scores_F, always_on=shape.always_on, slots=shape.experts * shape.n)
    always_on_S, routed_U, _ = roles
    if not shape.experts:  # this layer gives no expert to the pool
        return LayerPartition(*roles, routed_U.clone(), routed_U.new_empty(0, shape.n))

    def energy() -> methods.TokenEnergy:
        assert activity is not None, "no pass was made, which only router_aware makes"
        return methods.measure_energy(*activity, routed_U, always_on_S, top_k=shape.top_k)

    labels_U, affinity_UE = methods.group_neurons(
        method, scores_F[routed_U], lambda: features()[routed_U], energy, shape.experts, shape.n, rng=rng
    )
    return LayerPartition(*roles, labels_U, routed_U[methods.fill_experts(affinity_UE, labels_U, shape.n)])
