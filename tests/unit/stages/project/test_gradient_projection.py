from types import SimpleNamespace

import pytest
import torch
from draws import draw

from models.experts import slice_experts
from models.ffn import DenseFFN
from stages.project.config import ProjectConfig
from stages.project.gradient_projection import neuron_dim, project_neurons, read_text

D, F, E, N = 6, 12, 3, 2
NEURONS_EN, ALWAYS_S = torch.tensor([[0, 5], [5, 7], [2, 3]]), torch.tensor([11])


def test_every_neuron_moves_by_the_asked_length_along_its_own_gradient():
    ffn = DenseFFN(draw(F, D, seed=1), draw(F, D, seed=2), draw(D, F, seed=3), torch.nn.functional.silu)
    experts = slice_experts(ffn.projections, NEURONS_EN, ALWAYS_S)
    for name in ("gate_END", "down_EDN", "shared_up_SD", "shared_down_DS"):
        weight, dim = getattr(experts, name), neuron_dim(name)
        gradient = draw(*weight.shape, seed=9) * 1e3
        moved = weight.clone()
        project_neurons([moved], [gradient], [-0.24], [dim], epsilon=1e-8)
        step = moved - weight
        lengths = step.norm(dim=dim)
        assert lengths.numel() == (1 if name.startswith("shared") else E * N)
        torch.testing.assert_close(lengths, torch.full_like(lengths, 0.24), rtol=1e-4, atol=0)
        cosine = torch.nn.functional.cosine_similarity(step, gradient, dim=dim)
        torch.testing.assert_close(cosine, torch.full_like(cosine, -1), rtol=1e-5, atol=0)


def test_a_neuron_without_a_gradient_stays_where_it_is():
    weight_NP = torch.ones(2, 3)
    project_neurons([weight_NP], [torch.tensor([[0.0, 0.0, 0.0], [0.0, 5.0, 0.0]])], [-0.5], [-1], epsilon=1e-8)
    assert weight_NP.tolist() == [[1, 1, 1], [1, 0.5, 1]]


# Of 100 tokens that are wanted, or as many as the alignment has read, half must be there.
@pytest.mark.parametrize(
    ("read", "behind", "used"), [(300, 49, "read"), (300, 50, "behind"), (60, 29, "read"), (60, 30, "behind")]
)
def test_gradients_read_text_that_alignment_has_not_if_there_is_enough(read, behind, used):
    texts, asked = {"read": [SimpleNamespace(tokens=read)], "behind": [SimpleNamespace(tokens=behind)]}, []
    context = SimpleNamespace(text=texts["read"], further=lambda tokens: asked.append(tokens) or texts["behind"])
    found = read_text(context, ProjectConfig(gradient_tokens=80, validation_share=0.2))
    assert (found, asked) == (texts[used], [100])
