"""Alternate between partition and router: assign neurons to the experts of the tokens that need them, route tokens.

The objective is the routed energy: the part of Σ_j (h_j·‖d_j‖)² in the chosen experts. h_j is the residual of a
regression on the always-on neurons, because alignment replaces the predicted part. Tokens are routed by a ridge
regression, not by an oracle, because a partition is only useful if a linear router can choose its experts.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from models.ffn import DenseFFN
from models.routing import choose_experts, chosen_mask
from stages.calibration.balanced import assign_balanced
from stages.calibration.normal_equations import NormalEquations, ridge_cholesky

ROUTER_PENALTY = 0.1
PREDICT_PENALTY = 1e-2
SWEEPS = 2  # over the experts in `place_copies`


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
    best_U, most = labels_U, -1.0
    for _ in range(iterations + 1):
        held_TE = energy.held(members(labels_U, len(sizes_E), energy.energy_TU))
        mask_TE = energy.route(held_TE)
        routed = float((mask_TE * held_TE).sum())
        if routed > most:
            best_U, most = labels_U, routed
        next_U = assign_balanced((energy.energy_TU.T @ mask_TE).cpu(), sizes_E)
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
