"""Router-aware clustering: alternate between partition and router."""

import numpy as np
import pytest
import torch
from operator_counts import count_operators

from models.config import MoEShape
from models.ffn import DenseFFN
from stages.calibration.share import sample_rows
from stages.cluster.layer import partition_layer
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


def energy_of(activity):
    ffn, inputs = activity
    return measure_energy(ffn, sample_rows(inputs, T), ROUTED_U, ALWAYS_S, top_k=K)


def test_a_bad_start_ends_at_the_groups_that_belong_together(activity):
    energy, sizes_E = energy_of(activity), torch.full((E,), 6)
    start_U = torch.arange(24) // 6
    labels_U = regroup(energy, start_U, sizes_E, iterations=20)
    assert labels_U.bincount().tolist() == [6] * E

    def routed_energy(labels_U):
        held_ET = members(labels_U, E, energy.energy_UT) @ energy.energy_UT
        torch.testing.assert_close(energy.held(labels_U, E), held_ET)
        return float((energy.route(held_ET).T * held_ET).sum())

    assert routed_energy(start_U) < routed_energy(labels_U)
    assert routed_energy(labels_U) > 0.98 * routed_energy(HOME_U)
    assert torch.equal(regroup(energy, HOME_U, sizes_E, iterations=0), HOME_U)


def test_energy_leaves_out_what_always_on_neurons_predict(activity):
    ffn, inputs = activity
    copied = ffn.gate_FD.clone()
    copied[24] = copied[0]
    twin = DenseFFN(copied, copied.clone(), ffn.down_DF, ffn.act)
    plain, predicted = energy_of(activity), energy_of((twin, inputs))
    assert float(predicted.energy_UT[0].sum()) < 0.1 * float(plain.energy_UT[0].sum())


def test_energy_is_that_of_the_neurons_outputs(activity):
    ffn, inputs = activity
    energy = measure_energy(ffn, inputs[0], ROUTED_U, ALWAYS_S[:0], top_k=K)
    outputs_UTD = ffn.hidden(inputs[0])[:, ROUTED_U].T[:, :, None] * ffn.down_DF.T[ROUTED_U][:, None]
    torch.testing.assert_close(energy.energy_UT, outputs_UTD.square().sum(2))


def test_a_partition_that_gets_worse_is_not_returned(activity, monkeypatch):
    monkeypatch.setattr("stages.cluster.methods.assign_balanced", lambda *_: torch.arange(24) // 6)
    assert torch.equal(regroup(energy_of(activity), HOME_U, torch.full((E,), 6), iterations=3), HOME_U)


def test_copies_go_where_they_are_missed(activity):
    energy = energy_of(activity)
    labels_U = torch.cat([torch.tensor([1, 0]), HOME_U[2:]])  # neurons 0 and 1 swapped
    member_EU = place_copies(energy, labels_U, E, 8)
    assert member_EU.sum(1).tolist() == [8.0] * E
    assert (member_EU >= members(labels_U, E, member_EU)).all()
    assert member_EU[0, 0] == member_EU[1, 1] == 1
    before_EU = members(labels_U, E, member_EU)
    mask_TE = energy.route(before_EU @ energy.energy_UT)

    def routed_energy(member_EU):
        return float(((mask_TE @ member_EU).clamp_max(1) * energy.energy_UT.T).sum())

    assert routed_energy(member_EU) > 1.02 * routed_energy(before_EU)


@pytest.mark.parametrize(("experts", "size"), [(1, 24), (1, 20), (4, 6), (5, 4), (7, 4), (4, 9), (24, 1), (30, 3)])
def test_every_shape_is_grouped(activity, experts, size):
    """One expert, fewer and more places than neurons, experts of unequal homes, more experts than neurons."""
    (ffn, inputs), rank_F = activity, torch.arange(float(F))
    found = partition_layer(
        rank_F,
        lambda: ffn.gate_FD,
        MoEShape(experts=experts, n=size, top_k=1, always_on=len(ALWAYS_S)),
        method="router_aware",
        rng=np.random.default_rng(0),
        activity=(ffn, torch.cat(inputs)),
    )
    assert found.neurons_EN.shape == (experts, size)
    assert (found.neurons_EN.diff(dim=1) > 0).all()
    assert torch.equal(found.neurons_EN.unique(), found.routed_U)
    assert len(found.routed_U) == min(24, experts * size)
    homes_E = found.labels_U.bincount(minlength=experts)
    assert homes_E.max() - homes_E.min() <= 1


def test_a_round_has_at_most_30_operators_whatever_the_number_of_experts_and_waits_once(activity, monkeypatch):
    energy, found = energy_of(activity), {}
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: waits.append(tensor) or tensor)
    for experts in (4, 12):
        for rounds in (1, 2):
            waits = []
            # Every assignment is another one, so that no round is the last.
            turns = iter([ROUTED_U % experts, (ROUTED_U + 1) % experts, (ROUTED_U + 2) % experts])
            monkeypatch.setattr("stages.cluster.methods.assign_balanced", lambda *_, turns=turns: next(turns))
            start_U, sizes_E = (ROUTED_U + 3) % experts, torch.full((experts,), 24 // experts)
            operators = count_operators(regroup, energy, start_U, sizes_E, iterations=rounds - 1)
            found[experts, rounds] = operators.started.total(), len(waits)
    assert [found[4, rounds] for rounds in (1, 2)] == [found[12, rounds] for rounds in (1, 2)]
    (one, wait), (two, waits) = found[4, 1], found[4, 2]
    assert two - one <= 30
    assert waits - wait == 1
