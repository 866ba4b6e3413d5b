"""The views in which two neurons can be compared, each a matrix of one row per neuron."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn.functional import normalize

from models.checkpoint.reader import ShardReader
from models.dense import dense_family
from models.experts import read_part
from models.source import read_config, resolve_folder
from stages.cluster.config import ClusterConfig
from stages.cluster.evidence import FEATURES, LayerEvidence, require

CHUNK = 1024  # neurons unpacked at a time: 32 MiB at 8192 tokens
SWEEPS = 3


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


def join_views(views: Sequence[Tensor]) -> Float[Tensor, "F C"]:
    """Put the rows of several views side by side so that each view tells neurons apart equally much.

    Every row becomes a direction, every view is divided by the root-mean-square distance of its directions from their
    mean: without that a view in which all neurons look much alike (non-negative features) would hardly count. The
    cosine of two joint rows is a mean of the views' cosines. A single view is returned as it is.

    Args:
        views: ``(F, C)`` fp32 each, C differs; a zero row is a neuron without direction in that view.
    Returns:
        ``(F, ΣC)``; a view in which all neurons are the same is all zeros.
    """
    if len(views) == 1:
        return views[0]
    return torch.cat([_spread_to_one(normalize(view_FC.float(), dim=1)) for view_FC in views], dim=1)


def _spread_to_one(directions_FC: Float[Tensor, "F C"]) -> Float[Tensor, "F C"]:
    present_UC = directions_FC[directions_FC.any(dim=1)]
    logit_std = (present_UC - present_UC.mean(0)).square().sum(1).mean().sqrt()
    return directions_FC / logit_std if logit_std > 1e-6 else torch.zeros_like(directions_FC)


def profile_features(taylor_GF: Float[Tensor, "G F"]) -> Float[Tensor, "F G"]:
    """Roots of the shares of a neuron's Taylor score that fall to each domain, all domains being equally loud.

    The rows have unit length and the cosine of two rows is the Bhattacharyya coefficient of the two profiles.

    Args:
        taylor_GF: mean |h·∂loss/∂h| of every domain, >= 0.
    Returns:
        ``(F, G)`` fp32; the zero row for a neuron of no importance.
    """
    loudness_G1 = taylor_GF.double().sum(1, keepdim=True)
    even_GF = taylor_GF.double() / loudness_G1.clamp_min(torch.finfo(torch.float64).tiny)
    shares_GF = even_GF / even_GF.sum(0).clamp_min(torch.finfo(torch.float64).tiny)
    return shares_GF.sqrt().T.float()


LEAST_POWER = 1e-10  # of the strongest direction's; below it there is rounding only


def contribution_features(
    hiddens: Callable[[], Iterable[Tensor]], down_DF: Float[Tensor, "D F"], *, dims: int, rng: np.random.Generator
) -> Float[Tensor, "F C"]:
    """Neurons by |h_j|·‖d_j‖ over tokens, every token's row of unit length, so that loud tokens do not drown the rest.

    The cosine of two neurons is (up to the reduction) that of their contributions over tokens.

    Args:
        hiddens: gives the neuron activations, ``(T, F)`` batch by batch, as often as it is called.
        down_DF: columns d_j.
        dims: directions kept, C = min(dims, F).
        rng: draws the first directions.
    Returns:
        ``(F, C)`` fp32 on the CPU; the zero row for a neuron that never contributes.
    """
    norms_F = down_DF.float().norm(dim=0)
    return reduce_columns(
        lambda: (normalize(h_TF.float().abs() * norms_F, dim=1) for h_TF in hiddens()), len(norms_F), dims, rng
    ).cpu()


def reduce_columns(
    batches: Callable[[], Iterable[Tensor]], width: int, dims: int, rng: np.random.Generator
) -> Float[Tensor, "F C"]:
    """Coordinates of the columns of A (all tokens × F) in the span of A's leading left singular vectors.

    A is streamed, once a sweep, and nothing of its length is kept: with Q orthonormal (F, C) and Y = A·Q, the
    coordinates in the span of Y's columns are AᵀY·(YᵀY)^(-1/2).

    Source: randomised subspace iteration, arXiv:0909.4061 algorithm 4.4.
    """
    drawn_FC = torch.from_numpy(rng.standard_normal((width, min(dims, width)), dtype=np.float32))
    for _ in range(SWEEPS):
        pulled_FC, power_CC = _pull(batches(), torch.linalg.qr(drawn_FC).Q)
        drawn_FC = pulled_FC
    values_C, vectors_CC = torch.linalg.eigh(power_CC)
    kept_C = values_C > LEAST_POWER * values_C[-1]
    scale_C = torch.where(kept_C, values_C.clamp_min(torch.finfo(torch.float64).tiny).rsqrt(), 0.0)
    coordinates_FC: Tensor = pulled_FC @ (vectors_CC * scale_C).to(pulled_FC)
    return coordinates_FC


def _pull(batches: Iterable[Tensor], basis_FC: Tensor) -> tuple[Tensor, Tensor]:
    """AᵀA·Q, and QᵀAᵀA·Q in float64."""
    pulled_FC, power_CC = torch.zeros_like(basis_FC), torch.zeros(basis_FC.shape[1], basis_FC.shape[1]).double()
    for batch_TF in batches:
        basis_FC, pulled_FC, power_CC = basis_FC.to(batch_TF), pulled_FC.to(batch_TF), power_CC.to(batch_TF.device)
        seen_TC = batch_TF @ basis_FC
        pulled_FC += batch_TF.T @ seen_TC
        power_CC += seen_TC.double().T @ seen_TC.double()
    return pulled_FC, power_CC


NAMES = {
    "coactivation": "co-activation",
    "gate_rows": "gate rows",
    "contribution": "contribution",
    "taylor_profile": "Taylor profile",
}


def view_neurons(cluster: ClusterConfig, evidence: LayerEvidence) -> Float[Tensor, "F C"]:
    """The features of a layer's neurons that the settings ask for.

    Raises:
        ConfigError: the scan did not keep what they are made of.
    """
    return join_views([VIEWS[name](evidence, cluster.feature_dims) for name in cluster.views])


def name_views(cluster: ClusterConfig) -> str:
    """The views in words."""
    return " and ".join(NAMES[name] for name in cluster.views)


def view_coactivation(evidence: LayerEvidence, dims: int) -> Float[Tensor, "F C"]:
    """On which tokens a neuron fires."""
    statistics = evidence.statistics
    require(
        statistics.reservoir_tokens,
        "the scan kept no activation bitmaps to compare neurons by",
        "scan.reservoir_tokens=4096, or cluster.features=gate_rows",
    )
    bits_Fr = statistics.active_bits[evidence.layer]
    return coactivation_features(bits_Fr, statistics.reservoir_tokens, dims=dims, rng=evidence.draw(FEATURES))


def view_gate_rows(evidence: LayerEvidence, dims: int) -> Float[Tensor, "F C"]:
    """What a neuron listens to."""
    folder = resolve_folder(evidence.model)
    with ShardReader(folder) as reader:
        gate_name, _up, _down = dense_family(read_config(folder)).ffn(evidence.layer)
        gate_FD = read_part(reader, gate_name)
    return gate_row_features(gate_FD, dims=dims, rng=evidence.draw(FEATURES))


def view_contribution(evidence: LayerEvidence, dims: int) -> Float[Tensor, "F C"]:
    """To which tokens' outputs a neuron adds how much."""
    activity = evidence.activity
    return contribution_features(activity.hiddens, activity.ffn.down_DF, dims=dims, rng=evidence.draw(FEATURES))


def view_taylor_profile(evidence: LayerEvidence, _dims: int) -> Float[Tensor, "F G"]:
    """To which text domains a neuron is important."""
    domains, remedy = evidence.domains, "data.domain_field=, files of several domains, or cluster.features=coactivation"
    require(domains, "the scan kept no Taylor sums by text domain", "scan.domains=true")
    assert domains is not None
    require(len(domains.names) >= 2, f"the calibration text has one domain only ({domains.names[0]})", remedy)
    samples_G1 = torch.tensor(domains.samples)[:, None]
    return profile_features(domains.sum_taylor[:, evidence.layer] / samples_G1)


VIEWS: dict[str, Callable[[LayerEvidence, int], Tensor]] = {
    "coactivation": view_coactivation,
    "gate_rows": view_gate_rows,
    "contribution": view_contribution,
    "taylor_profile": view_taylor_profile,
}
