from dataclasses import replace

import pytest
import torch
from draws import draw

from models.experts import ExpertLoop, slice_experts
from models.ffn import DenseFFN
from models.routing import GateKind, LinearRouter, active_copies, membership, relative_gates
from stages.calibration.alignment import align_down, at_usual_gates, column_scale, relative_error, scale_columns
from stages.calibration.share import split_validation
from stages.evaluate.baselines import CarvedFFN
from stages.project.config import ProjectConfig

T, D, F, E, N, K = 50, 6, 12, 4, 3, 2


SETTINGS = ProjectConfig(penalties=[1e-3, 1e-1], validation_share=0.25)


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
    aligned = align_down(carved, inputs, wanted, SETTINGS)
    assert aligned.penalty in {1e-3, 1e-1}
    _, validation = split_validation(len(inputs), 0.25)
    before, after = (relative_error(one, inputs, wanted, validation) for one in (carved, aligned.carved))
    assert aligned.error == after < 0.9 * before


def test_the_columns_of_the_next_larger_penalty_are_kept_for_descent(ffn, inputs):
    carved = CarvedFFN(lambda x_TD: ffn.hidden(x_TD) * (torch.arange(F) < 7), ffn.down_DF)
    wanted = [ffn(x_TD) for x_TD in inputs]
    aligned = align_down(carved, inputs, wanted, replace(SETTINGS, penalties=[1e-3, 1e-1, 10.0]))
    larger = {1e-3: 1e-1, 1e-1: 10.0}[aligned.penalty]
    alone = align_down(carved, inputs, wanted, replace(SETTINGS, penalties=[larger], validate=False))
    assert torch.equal(aligned.less_fitted.down_DF, alone.carved.down_DF)
    assert alone.less_fitted is None  # there is no larger one


def test_nothing_to_gain_changes_nothing(ffn, inputs):
    carved = CarvedFFN(ffn.hidden, ffn.down_DF)
    aligned = align_down(carved, inputs, [ffn(x_TD) for x_TD in inputs], SETTINGS)
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
    assert align_down(carved, inputs, wanted, SETTINGS).penalty is None
    assert align_down(carved, inputs, wanted, replace(SETTINGS, validate=False)).penalty is not None


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


KINDS = [kind for kind in GateKind if kind is not GateKind.CONSTANT]
APART = torch.arange(F).view(E, N)
COPIED = torch.tensor([[0, 1, 2], [2, 3, 4], [2, 4, 5], [6, 7, 8]])


FFN = DenseFFN(draw(F, D, seed=0), draw(F, D, seed=1), draw(D, F, seed=2), torch.nn.functional.silu)
INPUTS = [draw(T, D, seed=3), draw(T + 1, D, seed=4)]


def make_loop(gate, neurons_EN=APART, top_k=K, std=1.0):
    none_S = torch.empty(0, dtype=torch.int64)
    router = LinearRouter.without_bias(draw(E, D, seed=5) * std / D**0.5)
    experts = slice_experts(FFN.projections, neurons_EN, none_S)
    return ExpertLoop(experts, neurons_EN, none_S, router, top_k, F, FFN.act, gate)


def gates_of(loop):
    """(T, E) gates of the chosen experts, 0 elsewhere."""
    x_TD = torch.cat(INPUTS)
    logits_TE = x_TD @ loop.router.rows_ED.T
    chosen_TK = logits_TE.topk(loop.top_k).indices
    return torch.zeros_like(logits_TE).scatter(1, chosen_TK, relative_gates(loop.gate, logits_TE, chosen_TK))


@pytest.mark.parametrize("kind", KINDS)
def test_no_other_constant_is_nearer_to_one_on_the_tokens_an_expert_serves(kind):
    loop = make_loop(kind)
    scale_EN, gates_TE = column_scale(loop, INPUTS), gates_of(loop)
    for expert in range(E):
        gates_t = gates_TE[gates_TE[:, expert] > 0, expert]
        (best,) = torch.linalg.lstsq(gates_t[:, None], torch.ones(len(gates_t), 1)).solution
        torch.testing.assert_close(scale_EN[expert], best.expand(N))


def test_copies_and_gates_are_made_up_for_together():
    """For each neuron, no other multiple of the scaled, gated sum of its copies is nearer to 1."""
    loop = make_loop(GateKind.SOFTMAX_OF_ALL, COPIED)
    scale_EN, gates_TE = column_scale(loop, INPUTS), gates_of(loop)
    for neuron in range(9):
        copies_T = sum(gates_TE[:, e] * scale_EN[e, n] for e, n in (neuron == COPIED).nonzero().tolist())
        assert float(copies_T.sum() / copies_T.square().sum()) == pytest.approx(1, rel=1e-5)


def test_constant_gates_leave_what_copies_ask_for():
    assert torch.equal(column_scale(make_loop(GateKind.CONSTANT), INPUTS), torch.ones(E, N))
    loop = make_loop(GateKind.CONSTANT, COPIED)
    member_EF = membership(COPIED, F)
    copies_TF = torch.cat([active_copies(loop.router.choose(x_TD, K), member_EF, loop.always_S) for x_TD in INPUTS])
    scale_F = copies_TF.sum(0) / copies_TF.square().sum(0)
    torch.testing.assert_close(column_scale(loop, INPUTS), scale_F[COPIED])
    every = make_loop(GateKind.CONSTANT, COPIED, top_k=E)
    multiplicity_F = COPIED.flatten().bincount(minlength=F)
    torch.testing.assert_close(column_scale(every, INPUTS), 1 / multiplicity_F[COPIED])


def test_an_expert_that_no_token_chooses_keeps_its_columns():
    loop = make_loop(GateKind.SIGMOID)
    unwanted = replace(loop, router=LinearRouter(loop.router.rows_ED, torch.tensor([0, 0, -1e4, 0])))
    assert torch.equal(column_scale(unwanted, INPUTS)[2], torch.ones(N))


def test_usual_gates_undo_the_scale():
    """Routers are fitted to these experts: scaled experts at their usual gates equal plain slices at gate 1."""
    loop = make_loop(GateKind.SOFTMAX_OF_ALL)
    scaled = scale_columns(loop, column_scale(loop, INPUTS))
    usual = at_usual_gates(scaled, INPUTS)
    torch.testing.assert_close(usual.experts.down_EDN, loop.experts.down_EDN)
