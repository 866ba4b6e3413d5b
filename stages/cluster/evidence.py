"""The data by which a layer's neurons are grouped: statistics, scores, activity on text, features."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from instruments.errors import ConfigError
from models.checkpoint.shards import ShardReader
from models.config import ModelConfig
from models.ffn import DenseFFN
from models.source import resolve_folder
from stages.artifacts.statistics import NeuronStatistics, Scores
from stages.calibration.batches import DealtLayer
from stages.calibration.share import sample_rows
from stages.cluster.config import ClusterConfig

FEATURES, GROUPING, LAYOUT, CONTROL = range(4)  # purposes of a layer's random number streams


@dataclass(frozen=True)
class LayerEvidence:
    """A layer's statistics and scores, and its activity if the settings need a pass."""

    layer: int
    model: ModelConfig
    statistics: NeuronStatistics  # of all layers, like the scores
    scores: Scores | None  # None: nothing is ranked by score
    seed: int
    activity: DealtLayer | None = None  # on the calibration text; None: no pass was made

    def sample(self, tokens: int) -> tuple[DenseFFN, Float[Tensor, "T D"]]:
        """The FFN and at most `tokens` of its inputs, evenly spaced over the text; needs a pass."""
        assert self.activity is not None, "no pass was made, see needs_pass in config.py"
        return self.activity.ffn, sample_rows(self.activity.inputs, tokens)

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


CHUNK = 1024  # neurons unpacked at a time: 32 MiB at 8192 tokens
SWEEPS = 3
FEATURE_DIMS = 64  # singular directions kept


def coactivation_features(
    active_bits_Fr: UInt8[Tensor, "F r"], tokens: int, *, dims: int, rng: np.random.Generator
) -> Float[Tensor, "F C"]:
    """Each neuron's activation bits over R reservoir tokens, projected onto their leading singular directions.

    Up to this projection, the cosine of two rows is |i∩j| / √(|i|·|j|), where |i∩j| counts the tokens on which both
    neurons fire. Bits are packed, most significant first.

    Returns:
        ``(F, min(dims, R))`` fp32; the zero row for a neuron that never fires.
    """
    return _project_on_top_directions(
        lambda start, stop: unpack_bits(active_bits_Fr[start:stop], tokens), len(active_bits_Fr), tokens, dims, rng
    )


def gate_row_features(gate_FD: Float[Tensor, "F D"], *, dims: int, rng: np.random.Generator) -> Float[Tensor, "F C"]:
    """Each neuron's gate row, projected onto the leading singular directions; C = min(dims, D)."""
    return _project_on_top_directions(
        lambda start, stop: gate_FD[start:stop].float(), len(gate_FD), gate_FD.shape[1], dims, rng
    )


def unpack_bits(packed_Ur: UInt8[Tensor, "U r"], tokens: int) -> Float[Tensor, "U R"]:
    """Unpack bits to fp32 zeros and ones."""
    return torch.from_numpy(np.unpackbits(packed_Ur.numpy(), axis=1, count=tokens)).float()


def _project_on_top_directions(
    rows: Callable[[int, int], Tensor], count: int, width: int, dims: int, rng: np.random.Generator
) -> Float[Tensor, "F C"]:
    """Coordinates of all rows in the span of their leading right singular vectors, a chunk of rows in memory at a time.

    Clustering needs only cosines within the span, so the singular vectors themselves are not computed.
    Source: randomised subspace iteration, arXiv:0909.4061 algorithm 4.4.
    """
    starts = range(0, count, CHUNK)
    directions_MC = torch.from_numpy(rng.standard_normal((width, min(dims, width)), dtype=np.float32))
    for _ in range(SWEEPS):
        pulled_MC = torch.zeros_like(directions_MC)
        for start in starts:
            chunk_UM = rows(start, start + CHUNK)
            pulled_MC += chunk_UM.T @ (chunk_UM @ directions_MC)
        directions_MC = torch.linalg.qr(pulled_MC).Q
    return torch.cat([rows(start, start + CHUNK) @ directions_MC for start in starts])


def view_neurons(cluster: ClusterConfig, evidence: LayerEvidence) -> Float[Tensor, "F C"]:
    """Features of a layer's neurons, of the kind that `cluster.features` names.

    Raises:
        ConfigError: the scan did not keep them.
    """
    rng = evidence.draw(FEATURES)
    if cluster.features == "gate_rows":
        folder = resolve_folder(evidence.model)
        with ShardReader(folder) as reader:
            gate_FD = reader.tensor(reader.family.ffn(evidence.layer)[0])
        return gate_row_features(gate_FD, dims=FEATURE_DIMS, rng=rng)
    statistics = evidence.statistics
    if not statistics.reservoir_tokens:
        raise ConfigError(
            "the scan kept no activation bitmaps to compare neurons by",
            where="stage=cluster, setting cluster.features",
            do="scan.reservoir_tokens=4096, or cluster.features=gate_rows",
        )
    bits_Fr = statistics.active_bits[evidence.layer]
    return coactivation_features(bits_Fr, statistics.reservoir_tokens, dims=FEATURE_DIMS, rng=rng)
