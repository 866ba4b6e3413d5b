from dataclasses import dataclass, field

import pytest
import torch

from models.ffn import DenseFFN
from stages.calibration.alignment import align_down, relative_error
from stages.calibration.share import split_validation
from stages.evaluate.baselines import CarvedFFN

D, F = 6, 12


@dataclass
class Settings:
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
    carved = CarvedFFN(lambda x_TD: ffn.hidden(x_TD) * (torch.arange(F) < 7), ffn.down_DF)
    wanted = [ffn(x_TD) for x_TD in inputs]
    aligned = align_down(carved, inputs, wanted, Settings())
    assert aligned.penalty in {1e-3, 1e-1}
    _, validation = split_validation(len(inputs), 0.25)
    before, after = (relative_error(one, inputs, wanted, validation) for one in (carved, aligned.carved))
    assert aligned.error == after < 0.9 * before


def test_the_columns_of_the_next_larger_penalty_are_kept_for_descent(ffn, inputs):
    carved = CarvedFFN(lambda x_TD: ffn.hidden(x_TD) * (torch.arange(F) < 7), ffn.down_DF)
    wanted = [ffn(x_TD) for x_TD in inputs]
    aligned = align_down(carved, inputs, wanted, Settings(penalties=[1e-3, 1e-1, 10.0]))
    larger = {1e-3: 1e-1, 1e-1: 10.0}[aligned.penalty]
    alone = align_down(carved, inputs, wanted, Settings(penalties=[larger], validate=False))
    assert torch.equal(aligned.less_fitted.down_DF, alone.carved.down_DF)
    assert alone.less_fitted is None  # there is no larger one


def test_nothing_to_gain_changes_nothing(ffn, inputs):
    carved = CarvedFFN(ffn.hidden, ffn.down_DF)
    aligned = align_down(carved, inputs, [ffn(x_TD) for x_TD in inputs], Settings())
    assert aligned.penalty is None
    assert aligned.carved is carved


def test_without_validation_the_best_penalty_is_applied_even_where_it_hurts(ffn, inputs):
    # Targets of the fitted batches contain noise; those of the validation batches do not.
    _, validation = split_validation(len(inputs), 0.25)
    noise = torch.Generator().manual_seed(2)

    wanted = [
        ffn(x_TD) + (0 if index in validation else torch.randn(x_TD.shape, generator=noise))
        for index, x_TD in enumerate(inputs)
    ]
    carved = CarvedFFN(ffn.hidden, ffn.down_DF)
    assert align_down(carved, inputs, wanted, Settings()).penalty is None
    assert align_down(carved, inputs, wanted, Settings(validate=False)).penalty is not None


@pytest.mark.parametrize(
    ("batches", "share", "held"), [(16, 0.125, [4, 12]), (8, 0.25, [2, 6]), (2, 0.125, [0]), (1, 0.5, [0])]
)
def test_the_validation_split_is_spread_evenly(batches, share, held):
    fitted, validation = split_validation(batches, share)
    assert validation == held
    assert batches == 1 or sorted(fitted + validation) == list(range(batches))


@pytest.mark.parametrize(("sources", "held"), [("ab" * 8, 2), ("aab" * 6, 2), ("abc" * 8, 3), ("aabcabaa" * 8, 8)])
def test_every_source_of_a_mixture_has_validation_batches(sources, held):
    """Sources that alternate: evenly spaced batches would all be of one."""
    fitted, validation = split_validation(len(sources), 0.125, list(sources))
    assert {sources[batch] for batch in validation} == {*sources}
    assert (len(validation), sorted(fitted + validation)) == (held, [*range(len(sources))])


@pytest.mark.parametrize(("batches", "random"), [(16, []), (17, []), (18, [16]), (24, [20]), (32, [20, 28])])
def test_the_validation_text_does_not_depend_on_the_random_tokens_after_it(batches, random):
    """One batch of random tokens alone is for fitting."""
    fitted, validation = split_validation(batches, 0.125, [""] * 16)
    assert validation == [4, 12, *random]
    assert sorted(fitted + validation) == list(range(batches))
