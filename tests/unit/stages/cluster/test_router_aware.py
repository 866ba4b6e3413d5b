"""Router-aware clustering: alternate between partition and router."""

import pytest
import torch

from models.ffn import DenseFFN
from stages.calibration.share import sample_rows
from stages.cluster.methods import measure_energy, members, place_copies, regroup

D, F, E, K, T = 6, 27, 4, 1, 600
ALWAYS_S, ROUTED_U = torch.tensor([24, 25, 26]), torch.arange(24)
HOME_U = ROUTED_U % E


@pytest.fixture
def activity():
    """Neuron j responds to input direction j mod 4; the always-on neurons respond to direction 5."""
    generator = torch.Generator().manual_seed(0)
    direction_F = torch.arange(F) % E
    direction_F[ALWAYS_S] = 5
    gate_FD = 3 * torch.eye(D)[direction_F] + 0.1 * torch.randn(F, D, generator=generator)
    down_DF = torch.randn(D, F, generator=generator)
    inputs = [torch.randn(T // 2, D, generator=generator), torch.randn(T // 2, D, generator=generator)]
    return DenseFFN(gate_FD, gate_FD.clone(), down_DF, torch.nn.functional.silu), inputs


def energy_of(activity, tokens=T):
    ffn, inputs = activity
    return measure_energy(ffn, sample_rows(inputs, tokens), ROUTED_U, ALWAYS_S, top_k=K)


def test_a_bad_start_ends_at_the_groups_that_belong_together(activity):
    energy, sizes_E = energy_of(activity), torch.full((E,), 6)
    start_U = torch.arange(24) // 6
    labels_U = regroup(energy, start_U, sizes_E, iterations=20)
    assert labels_U.bincount().tolist() == [6] * E

    def routed_energy(labels_U):
        held_TE = energy.held(members(labels_U, E, energy.energy_TU))
        return float((energy.route(held_TE) * held_TE).sum())

    assert routed_energy(start_U) < routed_energy(labels_U)
    assert routed_energy(labels_U) > 0.98 * routed_energy(HOME_U)
    assert torch.equal(regroup(energy, HOME_U, sizes_E, iterations=0), HOME_U)


def test_energy_leaves_out_what_always_on_neurons_predict(activity):
    ffn, inputs = activity
    copied = ffn.gate_FD.clone()
    copied[24] = copied[0]
    twin = DenseFFN(copied, copied.clone(), ffn.down_DF, ffn.act)
    plain, predicted = energy_of(activity), energy_of((twin, inputs))
    assert float(predicted.energy_TU[:, 0].sum()) < 0.1 * float(plain.energy_TU[:, 0].sum())


def test_tokens_are_spread_over_the_text(activity):
    energy = energy_of(activity, tokens=100)
    assert energy.energy_TU.shape == (100, 24)
    assert torch.equal(energy.x_TD[-1], activity[1][1][-1])


def test_copies_go_where_they_are_missed(activity):
    energy = energy_of(activity)
    labels_U = torch.cat([torch.tensor([1, 0]), HOME_U[2:]])  # neurons 0 and 1 swapped
    member_EU = place_copies(energy, labels_U, E, 8)
    assert member_EU.sum(1).tolist() == [8.0] * E
    assert (member_EU >= members(labels_U, E, member_EU)).all()
    assert member_EU[0, 0] == member_EU[1, 1] == 1
    before_EU = members(labels_U, E, member_EU)
    mask_TE = energy.route(energy.held(before_EU))

    def routed_energy(member_EU):
        return float(((mask_TE @ member_EU).clamp_max(1) * energy.energy_TU).sum())

    assert routed_energy(member_EU) > 1.02 * routed_energy(before_EU)
