from dataclasses import replace
from itertools import combinations

import pytest
import torch

from models.experts import ExpertLoop, slice_experts
from stages.evaluate.baselines import start_baseline

METHODS = ("unaligned", "random_router", "oracle")


def copies(method, facts, x_TD):
    h_TF = facts.ffn.hidden(x_TD)
    return (start_baseline(method, facts, []).features(x_TD) / h_TF).round()


@pytest.mark.parametrize("method", METHODS)
def test_every_baseline_has_the_active_width_of_the_carve(facts, x_TD, method):
    copies_TF = copies(method, facts, x_TD)
    assert set(copies_TF.unique().tolist()) == {0.0, 1.0}
    assert copies_TF.sum(1).unique().tolist() == [facts.shape.active_width]


def test_the_static_mask_keeps_the_neurons_of_highest_contribution(facts, x_TD):
    carved = start_baseline("static_mask", facts, [])
    kept = facts.contribution_F >= facts.contribution_F.topk(facts.shape.active_width).values.min()
    assert carved.width == facts.shape.active_width == int(kept.sum())
    wanted_TD = (facts.ffn.hidden(x_TD) * kept) @ facts.ffn.down_DF.T
    torch.testing.assert_close(carved(x_TD), wanted_TD)


def test_the_oracle_takes_the_experts_of_largest_output(facts, x_TD):
    """The reference tries every choice of K experts."""
    h_TF = facts.ffn.hidden(x_TD)
    copies_TF = copies("oracle", facts, x_TD)
    for h_F, copies_F in zip(h_TF, copies_TF, strict=True):
        norms = [(facts.ffn.down_DF[:, neurons_N] @ h_F[neurons_N]).norm() for neurons_N in facts.neurons_EN]
        best = max(combinations(range(4), 2), key=lambda pair: sum(norms[expert] for expert in pair))
        expected = {*facts.neurons_EN[list(best)].flatten().tolist(), *facts.always_S.tolist()}
        assert set(copies_F.nonzero()[:, 0].tolist()) == expected


@pytest.mark.parametrize("copied", [False, True])
def test_unaligned_is_a_loop_over_the_chosen_experts(facts, x_TD, copied):
    """Copies of a neuron share its weight, as in the carve."""
    if copied:
        neurons_EN = facts.neurons_EN.clone()
        neurons_EN[3] = facts.neurons_EN[0]
        facts = replace(facts, neurons_EN=neurons_EN, shape=replace(facts.shape, top_k=4))
    experts = slice_experts(facts.ffn.projections, facts.neurons_EN, facts.always_S)
    if copied:  # all experts are on, so each copy gets half the weight
        half_EN = torch.tensor([0.5, 1.0, 1.0, 0.5])[:, None, None]
        experts = replace(experts, down_EDN=experts.down_EDN * half_EN)
    loop = ExpertLoop(
        experts, facts.neurons_EN, facts.always_S, facts.router, facts.shape.top_k, facts.ffn.width, facts.ffn.act
    )
    torch.testing.assert_close(start_baseline("unaligned", facts, [x_TD])(x_TD), loop(x_TD))


@pytest.mark.parametrize("method", METHODS)
def test_counts_of_experts_chosen_together_give_the_weight_of_copies(facts, x_TD, method):
    """The reference counts the active copies of every neuron for every token."""
    neurons_EN = facts.neurons_EN.clone()
    neurons_EN[3], neurons_EN[2, 0] = facts.neurons_EN[0], facts.neurons_EN[1, 0]
    facts = replace(facts, neurons_EN=neurons_EN)
    batches = [x_TD[:5], x_TD[5:]]
    carved, copies_TF = start_baseline(method, facts, batches), copies(method, facts, x_TD)
    wanted_F = copies_TF.sum(0) / copies_TF.square().sum(0)
    wanted_F = torch.where(wanted_F.isnan(), 1.0, wanted_F)
    torch.testing.assert_close(carved.down_DF, facts.ffn.down_DF * wanted_F)
    assert (wanted_F != 1).any()
