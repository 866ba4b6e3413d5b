"""Methods that group neurons by features: each gets one home expert, and an affinity to every expert.

router_aware alternates: neurons go to the experts of the tokens that need them, tokens to experts. It maximises the
routed energy: the part of Σ_j (h_j·‖d_j‖)² in the chosen experts. h_j is the residual of a regression on the always-on
neurons, because alignment replaces the predicted part. Tokens are routed by a ridge regression, not by an oracle,
because a partition is only useful if a linear router can choose its experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn.functional import normalize

from models.ffn import DenseFFN
from models.routing import choose_experts, chosen_mask
from stages.calibration.balanced import ITERATIONS, assign_balanced, fit_balanced_kmeans, mean_directions
from stages.calibration.normal_equations import NormalEquations, ridge_cholesky

ROUTER_PENALTY = 0.1
PREDICT_PENALTY = 1e-2
SWEEPS = 2  # over the experts in `place_copies`
CHUNK = 1024  # neurons unpacked at a time: 32 MiB at 8192 tokens
FEATURE_SWEEPS = 3
FEATURE_DIMS = 64  # singular directions kept


@dataclass(frozen=True)
class TokenEnergy:
    """Energy of every routed neuron on every token, and the inputs by which tokens are routed."""

    energy_TU: Tensor
    x_TD: Tensor
    factor_DD: Tensor  # Cholesky factor of the inputs' second moment with the ridge
    top_k: int

    def held(self, member_EU: Float[Tensor, "E U"]) -> Float[Tensor, "T E"]:
        """Each token's energy per expert."""
        return self.energy_TU @ member_EU.T

    def route(self, held_TE: Float[Tensor, "T E"]) -> Float[Tensor, "T E"]:
        """1 for the experts chosen by a linear router that is fitted to the log of the experts' energy."""
        wanted_TE = held_TE.clamp_min(1e-20).log_()
        wanted_TE -= wanted_TE.mean(1, keepdim=True)
        rows_DE = torch.cholesky_solve(self.x_TD.T @ wanted_TE, self.factor_DD)
        return chosen_mask(choose_experts(self.x_TD @ rows_DE, self.top_k), held_TE.shape[1])


def measure_energy(
    ffn: DenseFFN, x_TD: Float[Tensor, "T D"], routed_U: Int[Tensor, "U"], always_on_S: Int[Tensor, "S"], *, top_k: int
) -> TokenEnergy:
    """Energy of the routed neurons on these tokens. Memory: T × U."""
    hidden_TF = ffn.hidden(x_TD)
    kept_TS, hidden_TU = hidden_TF[:, always_on_S], hidden_TF[:, routed_U]
    del hidden_TF
    if len(always_on_S):
        moments = NormalEquations(len(always_on_S), len(routed_U), device=x_TD.device)
        moments.add(kept_TS, hidden_TU)
        hidden_TU.addmm_(kept_TS, moments.solve(PREDICT_PENALTY).T, alpha=-1)
    energy_TU = hidden_TU.mul_(ffn.down_DF.norm(dim=0)[routed_U]).square_()
    return TokenEnergy(energy_TU, x_TD, ridge_cholesky(x_TD.T @ x_TD, ROUTER_PENALTY).float(), top_k)


def regroup(
    energy: TokenEnergy, labels_U: Int[Tensor, "U"], sizes_E: Int[Tensor, "E"], *, iterations: int
) -> Int[Tensor, "U"]:
    """Alternately route the tokens and assign each neuron to the expert whose tokens need it most.

    Returns:
        ``(U,)`` the labels of highest routed energy, the initial ones included.
    """
    best_U, most, prices_E = labels_U, -1.0, torch.zeros(len(sizes_E), dtype=torch.float64)
    for _ in range(iterations + 1):
        mask_TE = energy.route(energy.held(members(labels_U, len(sizes_E), energy.energy_TU)))
        affinity_UE = (energy.energy_TU.T @ mask_TE).cpu()  # the only time that the host waits for the device
        routed = float(affinity_UE.gather(1, labels_U[:, None]).sum(dtype=torch.float64))
        if routed > most:
            best_U, most = labels_U, routed
        next_U = assign_balanced(affinity_UE, sizes_E, prices_E)
        if torch.equal(next_U, labels_U):
            break
        labels_U = next_U
    return best_U


def members(labels_U: Int[Tensor, "U"], experts: int, like: Tensor) -> Float[Tensor, "E U"]:
    """1 if the expert is the neuron's home."""
    labels_U = labels_U.to(like.device)
    return like.new_zeros(experts, len(labels_U)).scatter_(0, labels_U[None], 1.0)


def place_copies(energy: TokenEnergy, labels_U: Int[Tensor, "U"], experts: int, size: int) -> Float[Tensor, "E U"]:
    """Fill every expert to `size` neurons with those whose energy its tokens would miss.

    Every neuron stays in its home. An expert takes the neurons of most energy on those of its tokens that get them from
    no other chosen expert. Each sweep starts by routing the tokens again.

    Returns:
        ``(E, U)`` 1 if the expert holds the neuron; every row sums to `size`.
    """
    home_EU = members(labels_U, experts, energy.energy_TU)
    member_EU = home_EU.clone()
    for _ in range(SWEEPS):
        mask_TE = energy.route(energy.held(member_EU))
        for expert in range(experts):
            tokens_t = mask_TE[:, expert].nonzero()[:, 0]
            others_tE = mask_TE[tokens_t]
            others_tE[:, expert] = 0
            missing_tU = (others_tE @ member_EU) == 0
            worth_U = (energy.energy_TU[tokens_t] * missing_tU).sum(0)
            worth_U[home_EU[expert] > 0] = torch.inf
            member_EU[expert] = 0
            member_EU[expert, worth_U.topk(size).indices] = 1
    return member_EU


def group_sizes(neurons: int, groups: int) -> Int[Tensor, "E"]:
    """Sizes that sum to `neurons` and differ by at most one."""
    sizes_E = torch.full((groups,), neurons // groups)
    sizes_E[: neurons % groups] += 1
    return sizes_E


def fill_experts(affinity_UE: Float[Tensor, "U E"], labels_U: Int[Tensor, "U"], size: int) -> Int[Tensor, "E N"]:
    """Fill every group, of at most `size` ≤ U neurons, to `size` with the neurons of highest affinity to it.

    Returns:
        ``(E, N)`` int64 neurons of each expert, ascending: every neuron at least once, none twice in an expert; ties go
        to the lower index.
    """
    fit_EU = affinity_UE.T.clone()
    fit_EU[labels_U, torch.arange(len(labels_U))] = torch.inf
    best_EU = fit_EU.argsort(dim=1, descending=True, stable=True)
    return best_EU[:, :size].sort(dim=1).values


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
    for _ in range(FEATURE_SWEEPS):
        pulled_MC = torch.zeros_like(directions_MC)
        for start in starts:
            chunk_UM = rows(start, start + CHUNK)
            pulled_MC += chunk_UM.T @ (chunk_UM @ directions_MC)
        directions_MC = torch.linalg.qr(pulled_MC).Q
    return torch.cat([rows(start, start + CHUNK) @ directions_MC for start in starts])


Method = Literal["router_aware", "balanced_kmeans", "rank", "random", "contiguous"]


def group_neurons(
    method: Method,
    scores_U: Float[Tensor, "U"],
    features_UC: Callable[[], Tensor],
    measure: Callable[[], TokenEnergy],
    experts: int,
    size: int,
    *,
    rng: np.random.Generator,
) -> tuple[Int[Tensor, "U"], Float[Tensor, "U E"]]:
    """Group the routed neurons of a layer into experts of at most `size`.

    `features_UC` and `measure` are called only by the methods that need features, or energy (router_aware).

    Returns:
        Each neuron's home expert, and its affinity to every expert, which decides where copies go.
    """
    match method:
        case "router_aware" | "balanced_kmeans":
            features = features_UC()
            labels_U = fit_balanced_kmeans(features, group_sizes(len(features), experts), rng=rng)
            if method == "router_aware":
                return group_router_aware(measure(), labels_U, experts, size)
            directions_UC = normalize(features, dim=1)
            return labels_U, directions_UC @ mean_directions(directions_UC, labels_U, experts).T
        case "rank":  # dealt out in score order: every expert gets its share of high scores
            labels_U = scores_U.argsort(descending=True, stable=True).argsort() % experts
        case "random":  # the control: independent of activations and weights
            labels_U = torch.from_numpy(rng.permutation(len(scores_U))) % experts
        case "contiguous":  # neighbours in the weight matrix share an expert
            labels_U = torch.arange(experts).repeat_interleave(group_sizes(len(scores_U), experts))
    # An expert with room copies the next group, then the one after, so that copies are spread evenly.
    return labels_U, -((labels_U[:, None] - torch.arange(experts)) % experts).float()


def group_router_aware(
    energy: TokenEnergy, start_U: Int[Tensor, "U"], experts: int, size: int
) -> tuple[Int[Tensor, "U"], Float[Tensor, "U E"]]:
    """Improve partition and router alternately; copy neurons where tokens would miss them."""
    labels_U = regroup(energy, start_U, group_sizes(len(start_U), experts), iterations=ITERATIONS)
    if experts * size <= len(labels_U):
        return labels_U, members(labels_U, experts, energy.energy_TU).T.cpu()
    return labels_U, place_copies(energy, labels_U, experts, size).T.cpu()
