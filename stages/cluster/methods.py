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
from torch.nn.functional import embedding_bag, normalize

from instruments.device import rounded_products
from models.ffn import DenseFFN
from models.routing import choose_experts, chosen_mask
from stages.calibration.balanced import ITERATIONS, assign_balanced, fit_balanced_kmeans, mean_directions
from stages.calibration.normal_equations import NormalEquations, ridge_cholesky

ROUTER_PENALTY = 0.1
PREDICT_PENALTY = 1e-2
SWEEPS = 2  # over the experts in `place_copies`
FEATURE_SWEEPS = 3
FEATURE_DIMS = 64  # singular directions kept


@dataclass(frozen=True)
class TokenEnergy:
    """Energy of every routed neuron on every token, and the inputs by which tokens are routed."""

    energy_UT: Tensor
    x_TD: Tensor
    factor_DD: Tensor  # Cholesky factor of the inputs' second moment with the ridge
    top_k: int

    def held(self, labels_U: Int[Tensor, "U"], experts: int) -> Float[Tensor, "E T"]:
        """Each expert's energy on every token, of neurons with one home each: a sum in a fixed order on any device."""
        order_U, sizes_E = labels_U.argsort(stable=True), labels_U.bincount(minlength=experts)
        joined = torch.cat([order_U, sizes_E.cumsum(0) - sizes_E]).to(self.energy_UT.device)  # one copy, not two
        return embedding_bag(joined[: len(order_U)], self.energy_UT, joined[len(order_U) :], mode="sum")

    def route(self, held_ET: Float[Tensor, "E T"]) -> Float[Tensor, "T E"]:
        """1 for the experts chosen by a linear router that is fitted to the log of the experts' energy."""
        wanted_ET = held_ET.clamp_min(1e-20).log_()
        wanted_ET -= wanted_ET.mean(0)
        rows_DE = torch.cholesky_solve((wanted_ET @ self.x_TD).T, self.factor_DD)
        return chosen_mask(choose_experts(self.x_TD @ rows_DE, self.top_k), len(held_ET))


def measure_energy(
    ffn: DenseFFN, x_TD: Float[Tensor, "T D"], routed_U: Int[Tensor, "U"], always_on_S: Int[Tensor, "S"], *, top_k: int
) -> TokenEnergy:
    """Energy of the routed neurons on these tokens. Memory: T × U."""
    routed_U, always_on_S = routed_U.to(x_TD.device), always_on_S.to(x_TD.device)
    with rounded_products(on=["cpu"]):
        hidden_TF = ffn.hidden(x_TD)
    kept_TS, hidden_TU = hidden_TF[:, always_on_S], hidden_TF[:, routed_U]
    del hidden_TF
    if len(always_on_S):
        moments = NormalEquations(len(always_on_S), len(routed_U), device=x_TD.device)
        moments.add(kept_TS, hidden_TU)
        hidden_TU.addmm_(kept_TS, moments.solve(PREDICT_PENALTY).T, alpha=-1)
    energy_UT = hidden_TU.mul_(ffn.down_DF.norm(dim=0)[routed_U]).square_().T.contiguous()
    return TokenEnergy(energy_UT, x_TD, ridge_cholesky(x_TD.T @ x_TD, ROUTER_PENALTY).float(), top_k)


def regroup(
    energy: TokenEnergy, labels_U: Int[Tensor, "U"], sizes_E: Int[Tensor, "E"], *, iterations: int
) -> Int[Tensor, "U"]:
    """Alternately route the tokens and assign each neuron to the expert whose tokens need it most.

    Returns:
        ``(U,)`` the labels of highest routed energy, the initial ones included.
    """
    best_U, most, prices_E = labels_U, -1.0, torch.zeros(len(sizes_E), dtype=torch.float64)
    for _ in range(iterations + 1):
        mask_TE = energy.route(energy.held(labels_U, len(sizes_E)))
        affinity_UE = (energy.energy_UT @ mask_TE).cpu()  # the only time that the host waits for the device
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
    home_EU = members(labels_U, experts, energy.energy_UT)
    member_EU = home_EU.clone()
    for _ in range(SWEEPS):
        mask_TE = energy.route(member_EU @ energy.energy_UT)
        of_experts, tokens = mask_TE.T.nonzero().unbind(1)  # all at once, since the host waits for the device here
        counts = of_experts.bincount(minlength=experts).tolist()
        for expert, tokens_t in enumerate(torch.split(tokens, counts)):
            others_tE = mask_TE[tokens_t]
            others_tE[:, expert] = 0
            missing_Ut = (member_EU.T @ others_tE.T) == 0
            worth_U = (energy.energy_UT[:, tokens_t] * missing_Ut).sum(1)
            worth_U.masked_fill_(home_EU[expert] > 0, torch.inf)
            member_EU[expert].zero_().index_fill_(0, worth_U.topk(size).indices, 1.0)
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


def unpack_bits(packed_Ur: UInt8[Tensor, "U r"], tokens: int) -> Float[Tensor, "U R"]:
    """Unpack bits, most significant first, to fp32 zeros and ones."""
    masks_8 = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=packed_Ur.device)
    return (packed_Ur[:, :, None] & masks_8).ne(0).flatten(1)[:, :tokens].float()


def project_on_top_directions(
    rows_UM: Float[Tensor, "U M"], dims: int, rng: np.random.Generator
) -> Float[Tensor, "U C"]:
    """Coordinates of all rows in the span of their leading right singular vectors; C = min(dims, M).

    Clustering needs only cosines within the span, so the singular vectors themselves are not computed.
    Source: randomised subspace iteration, arXiv:0909.4061 algorithm 4.4.
    """
    width = rows_UM.shape[1]
    start_MC = torch.from_numpy(rng.standard_normal((width, min(dims, width)), dtype=np.float32))
    directions_MC = start_MC.to(rows_UM.device)
    for _ in range(FEATURE_SWEEPS):
        directions_MC = torch.linalg.qr(rows_UM.T @ (rows_UM @ directions_MC)).Q
    return rows_UM @ directions_MC


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
                energy = measure()
                labels_U = regroup(energy, labels_U, group_sizes(len(labels_U), experts), iterations=ITERATIONS)
                if experts * size <= len(labels_U):
                    return labels_U, members(labels_U, experts, energy.energy_UT).T.cpu()
                return labels_U, place_copies(energy, labels_U, experts, size).T.cpu()
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
