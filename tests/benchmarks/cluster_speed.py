"""Balanced k-means of one layer: seconds in all and by part, and the gap to the exact assignment."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from benchmarks.rows import Row
from benchmarks.timing import Task, take_turns
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import normalize

from stages.calibration.balanced import assign_balanced, fit_balanced_kmeans, mean_directions, seed_centroids
from stages.cluster.methods import FEATURE_DIMS, coactivation_features, group_sizes

CPU = torch.device("cpu")
TOKENS = 8192
TOPICS = 256
EXACT_WIDTH = 2048  # the exact solver needs F² doubles, and seconds


@dataclass(frozen=True)
class Layer:
    """FFN width, number of experts and the target in seconds."""

    width: int
    experts: int
    at_most: float | None = None

    @property
    def name(self) -> str:
        """The name in its rows."""
        return f"F = {self.width}, E = {self.experts}"


LAYERS = (Layer(4864, 16), Layer(9728, 100), Layer(18944, 128, at_most=60))


def measure_cluster(repetitions: int) -> list[Row]:
    """Seconds of k-means at the FFN widths of known models, by part for the widest, and the optimality gap."""
    rows = []
    for layer in LAYERS:
        features_FC = draw_features(layer.width)
        found = take_turns({layer.name: Task(lambda layer=layer, x=features_FC: group(x, layer))}, repetitions, CPU)
        rows.append(Row(f"balanced k-means, {layer.name}", found[layer.name], at_most=layer.at_most, unit="s"))
    return [*rows, *_measure_parts(LAYERS[-1], repetitions), measure_gap()]


def group(features_FC: Tensor, layer: Layer) -> Tensor:
    """k-means with its default settings."""
    sizes_E, rng = group_sizes(layer.width, layer.experts), np.random.default_rng(0)
    return fit_balanced_kmeans(features_FC, sizes_E, rng=rng)


def _measure_parts(layer: Layer, repetitions: int) -> list[Row]:
    bits_Fr, features_FC = draw_bits(layer.width), normalize(draw_features(layer.width), dim=1)
    sizes_E = group_sizes(layer.width, layer.experts)
    centroids_EC = seed_centroids(features_FC, layer.experts, np.random.default_rng(0))
    affinity_FE = features_FC @ centroids_EC.T
    parts: dict[str, Callable[[], object]] = {
        f"features of {TOKENS} tokens' bits": lambda: coactivation_features(
            bits_Fr, TOKENS, dims=FEATURE_DIMS, rng=np.random.default_rng(0)
        ),
        "first centroids": lambda: seed_centroids(features_FC, layer.experts, np.random.default_rng(0)),
        "one assignment": lambda: assign_balanced(affinity_FE, sizes_E),
    }
    found = take_turns({name: Task(part) for name, part in parts.items()}, repetitions, CPU)
    return [Row(f"  {layer.name}: {name}", seconds, unit="s") for name, seconds in found.items()]


def measure_gap() -> Row:
    """1 − our total ÷ the total of an exact solver of the assignment problem."""
    features_FC, experts = normalize(draw_features(EXACT_WIDTH), dim=1), 16
    sizes_E = group_sizes(EXACT_WIDTH, experts)
    centroids_EC = mean_directions(features_FC, torch.arange(EXACT_WIDTH) % experts, experts)
    affinity_FE = (features_FC @ centroids_EC.T).double()
    slots_FS = affinity_FE.repeat_interleave(sizes_E, dim=1).numpy()
    best = float(slots_FS[linear_sum_assignment(slots_FS, maximize=True)].sum())
    labels_F = assign_balanced(affinity_FE.float(), sizes_E)
    ours = float(affinity_FE.gather(1, labels_F[:, None]).sum())
    return Row(f"gap to the exact assignment, F = {EXACT_WIDTH}, E = {experts}", [1 - ours / best], at_most=0.01)


def draw_features(width: int, dims: int = FEATURE_DIMS) -> Tensor:
    """Features of neurons: topics of very different sizes, a large common part, and noise."""
    generator = torch.Generator().manual_seed(0)
    topics_TC = torch.randn(TOPICS, dims, generator=generator)
    topic_F = torch.multinomial(1 / torch.arange(1.0, TOPICS + 1), width, replacement=True, generator=generator)
    noise_FC = torch.randn(width, dims, generator=generator)
    return 2 * torch.randn(1, dims, generator=generator) + topics_TC[topic_F] + noise_FC


def draw_bits(width: int) -> Tensor:
    """Packed activation bits: 80 % are set on tokens of the neuron's topic, 10 % on others."""
    rng = np.random.default_rng(0)
    topic_F, topic_R = rng.integers(TOPICS, size=width), rng.integers(TOPICS, size=TOKENS)
    bits_Fr = np.empty((width, TOKENS // 8), dtype=np.uint8)
    for neuron in range(width):
        chance_R = np.where(topic_R == topic_F[neuron], 0.8, 0.1)
        bits_Fr[neuron] = np.packbits(rng.random(TOKENS, dtype=np.float32) < chance_R)
    return torch.from_numpy(bits_Fr)
