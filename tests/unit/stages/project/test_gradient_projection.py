import torch

from models.ffn import DenseFFN
from stages.calibration.slices import slice_ffn
from stages.project.gradient_projection import draw_experts, project_experts, project_matrix

D, F, E, N = 6, 12, 3, 2
UNITS_EN, ALWAYS_S = torch.tensor([[0, 5], [5, 7], [2, 3]]), torch.tensor([11])


def draw_ffn(seed):
    generator = torch.Generator().manual_seed(seed)
    gate_FD, up_FD, down_FD = (torch.randn(F, D, generator=generator) for _ in range(3))
    return DenseFFN(gate_FD, up_FD, down_FD.T.contiguous(), torch.nn.functional.silu)


def test_the_step_has_the_asked_length_along_the_experts_own_gradient():
    generator = torch.Generator().manual_seed(0)
    weight, gradient = torch.randn(E, N, D, generator=generator), torch.randn(E, N, D, generator=generator)
    step = project_matrix(weight, gradient, strength=0.24, epsilon=1e-8) - weight
    torch.testing.assert_close(step.flatten(1).norm(dim=1), torch.full((E,), 0.24), rtol=1e-4, atol=0)
    cosine = torch.nn.functional.cosine_similarity(step.flatten(1), gradient.flatten(1))
    torch.testing.assert_close(cosine, torch.ones(E), rtol=1e-5, atol=0)


def test_a_vanishing_gradient_moves_nothing():
    weight = torch.ones(E, N, D)
    assert torch.equal(project_matrix(weight, torch.zeros(E, N, D), strength=0.24, epsilon=1e-8), weight)


def test_only_named_matrices_move_and_always_on_units_stay():
    ffn, gradient = draw_ffn(1), draw_ffn(2)
    experts = slice_ffn(ffn, UNITS_EN, ALWAYS_S)
    moved = project_experts(
        experts, {"gate": gradient.gate_FD, "down": gradient.down_DF}, UNITS_EN, strength=-0.24, epsilon=1e-8
    )
    assert torch.equal(moved.up_END, experts.up_END)
    assert torch.equal(moved.shared_gate_SD, ffn.gate_FD[ALWAYS_S])
    for expert, units_N in enumerate(UNITS_EN):
        rows = gradient.gate_FD[units_N]
        torch.testing.assert_close(moved.gate_END[expert], ffn.gate_FD[units_N] - 0.24 * rows / rows.norm())
        columns = gradient.down_DF[:, units_N]
        torch.testing.assert_close(moved.down_EDN[expert], ffn.down_DF[:, units_N] - 0.24 * columns / columns.norm())


def test_random_experts_have_the_scale_of_the_extracted_ones():
    experts = slice_ffn(draw_ffn(1), UNITS_EN, ALWAYS_S)
    drawn = draw_experts(experts, seed=3)
    assert torch.equal(drawn.up_END, draw_experts(experts, seed=3).up_END)
    assert torch.equal(drawn.shared_up_SD, experts.shared_up_SD)
    assert not torch.isclose(drawn.gate_END, experts.gate_END).any()
    assert 0.6 < float(drawn.down_EDN.std() / experts.down_EDN.std()) < 1.4
