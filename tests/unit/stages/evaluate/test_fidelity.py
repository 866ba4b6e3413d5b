from dataclasses import replace

import pytest
import torch

from stages.evaluate.baselines import expert_grams, output_norms
from stages.evaluate.comparison import LayerFidelity

B, T, D = 2, 5, 6


@pytest.fixture
def x_BTD():
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def mask_BT():
    return torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]).bool()


def rows(mask_BT):
    return mask_BT.flatten().nonzero()[:, 0]


def choices(facts, x_BTD):
    return facts.router.choose(x_BTD.flatten(0, 1), facts.shape.top_k)


def dense_output(facts, x_BTD):
    return facts.ffn(x_BTD.flatten(0, 1)).view_as(x_BTD)


def test_half_the_output_misses_a_quarter_of_the_energy(facts, x_BTD, mask_BT):
    fidelity = LayerFidelity.start(facts)
    fidelity.add(facts, x_BTD, 0.5 * dense_output(facts, x_BTD), rows(mask_BT), choices(facts, x_BTD))
    assert fidelity.result().error == pytest.approx(0.25, rel=1e-5)


def test_batches_add_up(facts, x_BTD, mask_BT):
    output_BTD = 0.7 * dense_output(facts, x_BTD)
    whole, parts = LayerFidelity.start(facts), LayerFidelity.start(facts)
    whole.add(facts, x_BTD, output_BTD, rows(mask_BT), choices(facts, x_BTD))
    for row in range(B):
        x_1TD = x_BTD[row : row + 1]
        parts.add(facts, x_1TD, output_BTD[row : row + 1], rows(mask_BT[row : row + 1]), choices(facts, x_1TD))
    assert parts.result().error == pytest.approx(whole.result().error, rel=1e-6)
    assert (parts.result().agreement, parts.result().imbalance) == (whole.result().agreement, whole.result().imbalance)


def test_large_outputs_in_float16_rank_as_in_float32(facts, x_BTD):
    ffn = replace(facts.ffn, down_DF=facts.ffn.down_DF * (1000 / facts.ffn.down_DF.norm(dim=0).mean()))
    h_TF = ffn.hidden(x_BTD.flatten(0, 1))
    exact, low = (
        output_norms(expert_grams(replace(ffn, down_DF=ffn.down_DF.to(dtype)), facts.neurons_EN), h_TF.to(dtype),
                     facts.neurons_EN) for dtype in (torch.float32, torch.float16)
    )  # fmt: skip
    torch.testing.assert_close(low, exact, rtol=0.01, atol=1)


def test_load_and_agreement_against_a_count_token_by_token(facts, x_BTD, mask_BT):
    fidelity = LayerFidelity.start(facts)
    fidelity.add(facts, x_BTD, dense_output(facts, x_BTD), rows(mask_BT), choices(facts, x_BTD))
    load, agreed = [0] * 4, 0
    for x_D in x_BTD[mask_BT]:
        chosen = set((facts.router.rows_ED @ x_D).argsort(descending=True)[:2].tolist())
        h_F = facts.ffn.hidden(x_D[None])[0]
        norms_E = torch.stack(
            [(facts.ffn.down_DF[:, neurons_N] @ h_F[neurons_N]).norm() for neurons_N in facts.neurons_EN]
        )
        agreed += len(chosen & set(norms_E.argsort(descending=True)[:2].tolist()))
        load = [count + (expert in chosen) for expert, count in enumerate(load)]
    assert fidelity.load_E.tolist() == load
    assert fidelity.result().imbalance == pytest.approx(max(load) / (sum(load) / 4))
    assert fidelity.result().agreement == pytest.approx(agreed / (2 * 7))
    assert 0 < fidelity.result().agreement < 1
