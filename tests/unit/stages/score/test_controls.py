from types import SimpleNamespace

import torch

from stages.artifacts.carve import NeuronStatistics
from stages.score.stage import score_random, score_taylor, score_wanda

T, F = 5, 3


def test_controls_against_their_definitions():
    generator = torch.Generator().manual_seed(0)
    h_TF, gradient_TF = torch.randn(2, T, F, generator=generator, dtype=torch.float64)
    down_DF = torch.randn(4, F, generator=generator)
    norm_LF = down_DF.norm(dim=0)[None]

    taylor_LF = score_taylor((h_TF * gradient_TF).abs().sum(0)[None], T)
    torch.testing.assert_close(taylor_LF[0], (h_TF * gradient_TF).abs().mean(0).float())

    wanda_LF = score_wanda(h_TF.square().sum(0)[None], norm_LF, T)
    # ‖column‖·rms is the norm over the column of Wanda's |W|·‖x‖, divided by √T.
    per_weight_DF = down_DF.abs() * h_TF.norm(dim=0).float()
    torch.testing.assert_close(wanda_LF[0], per_weight_DF.norm(dim=0) / T**0.5)

    sums = SimpleNamespace(
        tokens=T,
        sum_abs=h_TF.abs().sum(0)[None],
        weight_norm_down=norm_LF,
        active_count=torch.tensor([[0, 5, 2]]),
    )
    contribution_LF = NeuronStatistics.contribution.fget(sums)
    outputs_TFD = h_TF[:, :, None].float() * down_DF.T
    torch.testing.assert_close(contribution_LF[0], outputs_TFD.norm(dim=2).mean(0))

    assert NeuronStatistics.frequency.fget(sums).tolist() == [[0.0, 1.0, 0.4000000059604645]]


def test_random_scores_are_seeded_and_no_layer_depends_on_another():
    scores_LF = score_random(3, 8, seed=4)
    assert torch.equal(scores_LF, score_random(3, 8, seed=4))
    assert torch.equal(scores_LF[:2], score_random(2, 8, seed=4))
    assert not torch.equal(scores_LF, score_random(3, 8, seed=5))
    assert len(scores_LF.unique()) == 24
    assert scores_LF.dtype == torch.float32
