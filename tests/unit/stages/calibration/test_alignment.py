from dataclasses import dataclass, field

import pytest
import torch

from models.ffn import DenseFFN
from models.routing import LinearRouter
from stages.calibration.alignment import align_down, relative_error, split_validation
from stages.calibration.carved_ffn import CarvedFFN, oracle_copies, replica_scale, routed_copies, static_copies

D, F = 6, 12


@dataclass
class Settings:
    alignment_target: str = "local"
    penalties: list[float] = field(default_factory=lambda: [1e-3, 1e-1])
    validation_share: float = 0.25
    validate: bool = True


@pytest.fixture
def ffn():
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    return DenseFFN(draw(F, D), draw(F, D), draw(D, F), torch.nn.functional.silu)


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(50 + index, D, generator=generator) for index in range(8)]


def test_alignment_helps_a_mask_on_tokens_it_was_not_fitted_on(ffn, inputs):
    carved = CarvedFFN(ffn, static_copies(torch.arange(7), F), ffn.down_DF)
    aligned = align_down(carved, inputs, lambda _index, x_TD: ffn(x_TD), Settings())
    assert aligned.penalty in {1e-3, 1e-1}
    assert aligned.error_after < 0.9 * aligned.error_before
    _, guard = split_validation(len(inputs), 0.25)
    assert relative_error(aligned.carved, inputs, lambda _i, x_TD: ffn(x_TD), guard) == aligned.error_after


def test_nothing_to_gain_changes_nothing(ffn, inputs):
    carved = CarvedFFN(ffn, static_copies(torch.arange(F), F), ffn.down_DF)
    aligned = align_down(carved, inputs, lambda _index, x_TD: ffn(x_TD), Settings())
    assert aligned.penalty is None
    assert aligned.carved is carved


def test_without_guard_the_best_penalty_is_applied_even_where_it_hurts(ffn, inputs):
    # Fitted batches ask for noise that the guard batches do not hold.
    _, guard = split_validation(len(inputs), 0.25)
    noise = torch.Generator().manual_seed(2)

    def target(index, x_TD):
        return ffn(x_TD) + (0 if index in guard else torch.randn(x_TD.shape, generator=noise))

    carved = CarvedFFN(ffn, static_copies(torch.arange(F), F), ffn.down_DF)
    assert align_down(carved, inputs, target, Settings()).penalty is None
    assert align_down(carved, inputs, target, Settings(validate=False)).penalty is not None


@pytest.mark.parametrize(
    ("batches", "share", "held"), [(16, 0.125, [4, 12]), (8, 0.25, [2, 6]), (2, 0.125, [1]), (1, 0.5, [0])]
)
def test_the_guard_is_spread_evenly(batches, share, held):
    fitted, guard = split_validation(batches, share)
    assert len(guard) == len(held)
    assert batches == 1 or sorted(fitted + guard) == list(range(batches))


def test_replica_scale_is_the_least_squares_constant(ffn):
    # Neuron 0 is in both experts. One always chosen of two: never two copies. Both chosen: always two.
    neurons_EN = torch.tensor([[0, 1, 2], [0, 3, 4]])
    always_S = torch.tensor([11])
    x_TD = [torch.randn(9, D, generator=torch.Generator().manual_seed(1))]
    router = LinearRouter.without_bias(torch.randn(2, D, generator=torch.Generator().manual_seed(2)))
    single = replica_scale(routed_copies(neurons_EN, always_S, F, 1, router), ffn, x_TD)
    both = replica_scale(routed_copies(neurons_EN, always_S, F, 2, router), ffn, x_TD)
    assert (single == 1).all()
    assert both[0] == 0.5
    assert (both[1:] == 1).all()


def test_the_oracle_takes_the_experts_of_largest_output(ffn):
    neurons_EN, always_S = torch.arange(9).view(3, 3), torch.tensor([10, 11])
    x_TD = torch.randn(5, D, generator=torch.Generator().manual_seed(3))
    h_TF = ffn.hidden(x_TD)
    copies_TF = oracle_copies(ffn, neurons_EN, always_S, 1)(x_TD, h_TF)
    for token, copies_F in enumerate(copies_TF):
        norms = [float((ffn.down_DF[:, neurons] @ h_TF[token, neurons]).norm()) for neurons in neurons_EN]
        best = max(range(3), key=norms.__getitem__)
        assert copies_F.nonzero()[:, 0].tolist() == [*neurons_EN[best].tolist(), 10, 11]
