"""What neurons are compared by: a matrix of one row per neuron."""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from instruments.errors import ConfigError
from models.checkpoint.reader import ShardReader
from models.config import ModelConfig
from models.dense import dense_family
from models.source import read_config, resolve_folder
from stages.cluster.config import ClusterConfig
from stages.cluster.evidence import FEATURES, LayerEvidence

CHUNK = 1024  # neurons unpacked at a time: 32 MiB at 8192 tokens
SWEEPS = 3
FEATURE_DIMS = 64  # directions kept


def coactivation_features(
    active_bits_Fr: UInt8[Tensor, "F r"], tokens: int, *, dims: int, rng: np.random.Generator
) -> Float[Tensor, "F C"]:
    """Where each neuron fires, as bits over reservoir tokens, in the directions that tell most neurons apart.

    The cosine of two rows is (up to the reduction) the share of tokens where both fire: |i∩j| / √(|i|·|j|).

    Args:
        active_bits_Fr: ``(F, ceil(R/8))`` packed bits, most significant first.
        tokens: R, at least 1.
        dims: directions kept, C = min(dims, R).
        rng: draws the first directions.
    Returns:
        ``(F, C)`` fp32; the zero row for a neuron that never fires.
    """
    return _project_on_top_directions(
        lambda start, stop: unpack_bits(active_bits_Fr[start:stop], tokens), len(active_bits_Fr), tokens, dims, rng
    )


def gate_row_features(gate_FD: Float[Tensor, "F D"], *, dims: int, rng: np.random.Generator) -> Float[Tensor, "F C"]:
    """What each neuron listens to: its gate row, in the directions that tell most neurons apart. C = min(dims, D)."""
    return _project_on_top_directions(
        lambda start, stop: gate_FD[start:stop].float(), len(gate_FD), gate_FD.shape[1], dims, rng
    )


def unpack_bits(packed_Ur: UInt8[Tensor, "U r"], tokens: int) -> Float[Tensor, "U R"]:
    """Packed bits as fp32 zeros and ones."""
    return torch.from_numpy(np.unpackbits(packed_Ur.numpy(), axis=1, count=tokens)).float()


def _project_on_top_directions(
    rows: Callable[[int, int], Tensor], count: int, width: int, dims: int, rng: np.random.Generator
) -> Float[Tensor, "F C"]:
    """Coordinates of all rows in the span of their leading right singular vectors, a chunk of rows in memory at a time.

    Cosines within the span are what clustering needs, so the vectors themselves are never told apart.

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
    """The features by which a layer's neurons are compared, as `cluster.features` asks.

    Raises:
        ConfigError: the scan did not keep them.
    """
    rng = evidence.draw(FEATURES)
    if cluster.features == "gate_rows":
        return gate_row_features(read_gate(evidence.model, evidence.layer), dims=FEATURE_DIMS, rng=rng)
    statistics = evidence.statistics
    if not statistics.reservoir_tokens:
        raise ConfigError(
            "the scan kept no activation bitmaps to compare neurons by",
            where="stage=cluster, setting cluster.features",
            do="scan.reservoir_tokens=4096, or cluster.features=gate_rows",
        )
    bits_Fr = statistics.active_bits[evidence.layer]
    return coactivation_features(bits_Fr, statistics.reservoir_tokens, dims=FEATURE_DIMS, rng=rng)


def read_gate(model: ModelConfig, layer: int) -> Float[Tensor, "F D"]:
    """A layer's gate_proj from the checkpoint."""
    folder = resolve_folder(model)
    with ShardReader(folder) as reader:
        gate_name, _up, _down = dense_family(read_config(folder)).ffn(layer)
        return reader.tensor(gate_name)
