import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from instruments.errors import NumericsError
from models.experts import Block
from stages.calibration import normal_equations
from stages.calibration.normal_equations import NormalEquations

T, A, Y = 31, 5, 3


def peak_of_tensors(work):
    """The most bytes of tensors alive during `work`, above those alive before it, by torch's allocator on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def draw(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(T, A, generator=generator), torch.randn(T, Y, generator=generator)


def test_streamed_ridge_equals_the_textbook_solution():
    a_TA, y_TY = draw()
    moments = NormalEquations(A, Y)
    moments.add(a_TA[:20], y_TY[:20])
    moments.add(a_TA[20:], y_TY[20:])
    gram = a_TA.double().T @ a_TA.double()
    penalty = 0.1 * gram.diagonal().mean() * torch.eye(A)
    expected = torch.linalg.solve(gram + penalty, a_TA.double().T @ y_TY.double()).T
    torch.testing.assert_close(moments.solve(0.1).double(), expected, rtol=1e-5, atol=1e-6)


# Blocks share token 7, and in the second case also input 2; in the first case no block has input 0.
DISJOINT = [([4], range(T)), ([2], [3, 7, 20]), ([3, 1], [7, 8])]
OVERLAPPING = [([4], range(T)), ([0, 2], [3, 7, 20]), ([2, 1], [7, 8]), ([3], [])]


@pytest.mark.parametrize("parts", [DISJOINT, OVERLAPPING])
def test_blocks_add_what_their_rows_add_in_full(parts):
    sparse, full = NormalEquations(A, Y), NormalEquations(A, Y)
    for seed in (0, 1):
        a_TA, y_TY = draw(seed)
        tensors = [(torch.tensor(tokens, dtype=torch.int64), torch.tensor(neurons)) for neurons, tokens in parts]
        blocks = [Block(tokens_t, neurons_N, a_TA[tokens_t][:, neurons_N]) for tokens_t, neurons_N in tensors]
        sparse.add_blocks(blocks, y_TY)
        rows_TA = torch.zeros(T, A)
        for block in blocks:
            rows_TA[block.tokens_t[:, None], block.neurons_N] += block.hidden_tN
        full.add(rows_TA, y_TY)
    order_A = sparse.order_A
    found_AA, full_AA = (each.upper(torch.arange(A), torch.float64).triu() for each in (sparse, full))
    expected_AA, expected_AY = (full_AA + full_AA.triu(1).T)[order_A][:, order_A], full.cross_AY[order_A]
    torch.testing.assert_close(found_AA, expected_AA.triu(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sparse.cross_AY, expected_AY, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sparse.solve(0.1), full.solve(0.1), rtol=1e-4, atol=1e-5)
    assert sparse.rows == 2 * T


def test_inputs_that_are_all_zero_ask_for_nothing():
    moments = NormalEquations(A, Y)
    moments.add(torch.zeros(T, A), torch.ones(T, Y))
    assert torch.equal(moments.solve(0.1), torch.zeros(Y, A))


def test_too_few_tokens_are_an_error():
    moments = NormalEquations(A, Y)
    moments.add(torch.ones(2, A), torch.ones(2, Y))
    with pytest.raises(NumericsError) as caught:
        moments.solve(0.0)
    assert caught.value.what == "2 calibration tokens do not determine 5 coefficients"


def test_a_non_finite_input_is_an_error():
    a_TA, y_TY = draw()
    a_TA[3, 1] = torch.inf
    moments = NormalEquations(A, Y)
    moments.add(a_TA, y_TY)
    with pytest.raises(NumericsError, match="the calibration moments are not finite"):
        moments.solve(0.1)


def test_large_sound_systems_are_solved_in_fp32_and_agree(monkeypatch):
    generator = torch.Generator().manual_seed(4)
    a_TA = torch.randn(300, 40, generator=generator) * torch.logspace(0, 2, 40)
    moments = NormalEquations(40, 3)
    moments.add(a_TA, torch.randn(300, 3, generator=generator))
    exact = moments.solve(0.1)
    monkeypatch.setattr(normal_equations, "FP32_MIN_INPUTS", 40)
    assert normal_equations.solving_dtype(40, 0.1) == torch.float32
    assert normal_equations.solving_dtype(40, 1e-4) == normal_equations.solving_dtype(39, 0.1) == torch.float64
    torch.testing.assert_close(moments.solve(0.1), exact, rtol=1e-3, atol=1e-6)


def test_inputs_that_are_never_active_get_no_weight():
    a_TA = torch.randn(50, 6, generator=torch.Generator().manual_seed(5))
    a_TA[:, 2] = 0
    moments = NormalEquations(6, 2)
    moments.add(a_TA, a_TA[:, :2])
    weight_YA = moments.solve(1e-9)
    assert not weight_YA[:, 2].any()
    torch.testing.assert_close(weight_YA[:, :2], torch.eye(2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("used", [1, 2])
def test_a_solve_keeps_half_a_matrix_of_moments_and_one_to_factor(used, monkeypatch):
    """`used`: all inputs, or every second one."""
    monkeypatch.setattr(normal_equations, "PANEL", 16)
    inputs = 512
    a_TA, made = torch.randn(600, inputs, generator=torch.Generator().manual_seed(6)), []
    a_TA[:, ::used] += 1
    a_TA[:, 1::used] *= used == 1
    stored = peak_of_tensors(lambda: made.append(NormalEquations(inputs, 2)))
    assert stored <= 0.55 * 8 * inputs**2
    made[0].add(a_TA, a_TA[:, :2])
    assert peak_of_tensors(lambda: made[0].solve(0.1)) <= 1.25 * 8 * (inputs // used) ** 2
