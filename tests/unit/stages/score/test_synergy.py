from dataclasses import replace

import pytest
import torch

from stages.score.config import ScoreConfig
from stages.score.stage import gradient_rate, score_synergy

# One layer of four neurons; all terms already span 0 to 1, so minmax does not change them.
ACTIVATION = torch.tensor([[0.0, 0.2, 0.6, 1.0]])
GRADIENT = torch.tensor([[1.0, 0.5, 0.0, 0.5]])
FREQUENCY = torch.tensor([[0.0, 1.0, 0.5, 0.1]])
SCORE = ScoreConfig(
    form="weighted", normalisation="minmax", activation_weight=2.0, gradient_weight=0.5, frequency_weight=1.0
)


def score(activation=ACTIVATION, gradients=(GRADIENT,), frequency=FREQUENCY, **options):
    return score_synergy(activation, list(gradients), frequency, replace(SCORE, **options))[0]


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("weighted", [-0.5, 1.15, 1.7, 1.85]),
        ("product", [0.0, 0.04 * 0.5**0.5, 0.36 * 0.5, 0.5**0.5 * 0.1]),
        ("inverse_gradient", [0.0, 1.4 / 1.25, 1.7, 2.1 / 1.25]),
    ],
)
def test_forms_by_hand(form, expected):
    torch.testing.assert_close(score(form=form), torch.tensor(expected))


@pytest.mark.parametrize("form", ["weighted", "product", "inverse_gradient"])
@pytest.mark.parametrize("normalisation", ["zscore", "rank", "minmax"])
def test_more_activation_more_frequency_and_less_gradient_score_higher(form, normalisation):
    steps = torch.arange(4.0)[None]
    options = {"form": form, "normalisation": normalisation}
    flat = torch.ones(1, 4)
    for s_p in (
        score(steps, (flat,), flat, **options),
        score(flat, (-steps,), 1 + steps, **options),
        score(flat, (flat,), steps, **options),
    ):
        assert s_p.isfinite().all()
        assert (s_p.diff() > 0).all()


def test_a_low_gradient_alone_decides_between_equals():
    assert (score(torch.ones(1, 4), (-torch.arange(4.0)[None],), torch.ones(1, 4)).diff() > 0).all()


@pytest.mark.parametrize("form", ["weighted", "product", "inverse_gradient"])
def test_a_scan_without_gradients_keeps_the_order_of_the_other_terms(form):
    zeros = torch.zeros(1, 4)
    without = score(gradients=(zeros, zeros, zeros), form=form)
    weightless = score(form=form, gradient_weight=0.0)
    torch.testing.assert_close(without, weightless)


def test_the_kind_of_largest_gradients_does_not_speak_for_all():
    torch.testing.assert_close(
        score(gradients=(GRADIENT, 1e6 * GRADIENT.flip(1))), score(gradients=(GRADIENT, GRADIENT.flip(1)))
    )


def test_layers_are_normalised_apart():
    activation, gradient, frequency = (torch.cat([term, 1000 * term]) for term in (ACTIVATION, GRADIENT, FREQUENCY))
    s_p_LF = score_synergy(activation, [gradient], frequency, replace(SCORE, normalisation="zscore"))
    torch.testing.assert_close(s_p_LF[0], s_p_LF[1])


def test_the_gradient_rate_takes_out_what_activation_alone_explains():
    activation = torch.tensor([[0.5, 1.0, 4.0, 2.0]], dtype=torch.float64)
    rate = gradient_rate(activation * torch.tensor([3.0, 3.0, 3.0, 6.0]), activation)
    expected = torch.log(torch.tensor([[3.0, 3.0, 3.0, 6.0]], dtype=torch.float64))
    torch.testing.assert_close(rate, expected, rtol=0, atol=1e-4)


def test_the_gradient_rate_of_neurons_that_are_never_active_is_finite_and_of_a_layer_without_gradients_0():
    norms, activation = torch.tensor([[0.0, 2.0, 1.0], [0.0, 0.0, 0.0]]), torch.tensor([[0.0, 1.0, 2.0]]).expand(2, 3)
    rate = gradient_rate(norms, activation)
    assert rate.isfinite().all()
    assert rate[0, 2] < rate[0, 0] < rate[0, 1]
    assert not rate[1].any()
