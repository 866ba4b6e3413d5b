"""Scales of down columns that compensate for gates and copies."""

from dataclasses import replace

import pytest
import torch

from models.experts import ExpertLoop, slice_ffn
from models.ffn import DenseFFN
from models.routing import GateKind, LinearRouter, active_copies, membership, relative_gates
from stages.calibration.alignment import at_usual_gates, column_scale, scale_columns

T, D, F, E, N, K = 50, 6, 12, 4, 3, 2
KINDS = [kind for kind in GateKind if kind is not GateKind.CONSTANT]
APART = torch.arange(F).view(E, N)
COPIED = torch.tensor([[0, 1, 2], [2, 3, 4], [2, 4, 5], [6, 7, 8]])


def draw(*size, seed):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


FFN = DenseFFN(draw(F, D, seed=0), draw(F, D, seed=1), draw(D, F, seed=2), torch.nn.functional.silu)
INPUTS = [draw(T, D, seed=3), draw(T + 1, D, seed=4)]


def make_loop(gate, neurons_EN=APART, top_k=K, std=1.0):
    none_S = torch.empty(0, dtype=torch.int64)
    router = LinearRouter.without_bias(draw(E, D, seed=5) * std / D**0.5)
    return ExpertLoop(slice_ffn(FFN, neurons_EN, none_S), neurons_EN, none_S, router, top_k, F, FFN.act, gate)


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


@pytest.mark.parametrize("kind", [GateKind.SOFTMAX_OF_ALL, GateKind.SIGMOID])
def test_scaled_slices_are_nearer_to_the_dense_ffn(kind):
    loop = make_loop(kind, top_k=E - 1)
    scaled = scale_columns(loop, column_scale(loop, INPUTS))
    wanted_TD = FFN(INPUTS[0])
    plain, better = ((wanted_TD - carved(INPUTS[0])).square().sum() for carved in (loop, scaled))
    assert better < plain


def test_usual_gates_undo_the_scale():
    """Routers are fitted to these experts: scaled experts at their usual gates equal plain slices at gate 1."""
    loop = make_loop(GateKind.SOFTMAX_OF_ALL)
    scaled = scale_columns(loop, column_scale(loop, INPUTS))
    usual = at_usual_gates(scaled, INPUTS)
    torch.testing.assert_close(usual.experts.down_EDN, loop.experts.down_EDN)
