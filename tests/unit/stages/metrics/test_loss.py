import pytest
import torch

from stages.losses import MeanLoss, supervised_tokens, token_losses

B, T, V = 2, 5, 7


def test_losses_are_shifted_masked_and_averaged_per_sample():
    logits = torch.randn(B, T, V, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, 2, 3, 4, 5], [-100, -100, 6, 1, -100]])
    losses = token_losses(logits, labels)
    log_probabilities = logits.log_softmax(-1)
    assert float(losses[0, 0]) == pytest.approx(-float(log_probabilities[0, 0, 2]), rel=1e-5)
    assert losses[1].nonzero()[:, 0].tolist() == [1, 2]
    assert supervised_tokens(labels).tolist() == [4, 2]


def test_perplexity_is_exp_of_the_mean():
    loss = MeanLoss(total=30.0, tokens=10)
    assert loss.nats == 3.0
    assert loss.perplexity == pytest.approx(20.0855, rel=1e-4)
