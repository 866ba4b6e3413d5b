import pytest
import torch

from models.capture.gradient_norms import break_even_length, gram, prefer_gram, row_norms_direct, row_norms_from_gram

B, T, D, F = 3, 7, 6, 12


@pytest.fixture
def operands():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(B, T, D, generator=generator), torch.randn(B, T, F, generator=generator)


def test_both_products_equal_the_explicit_gradient(operands):
    x_BTD, grad_BTF = operands
    explicit = torch.stack(
        [(grad.T.double() @ x.double()).norm(dim=1) for x, grad in zip(x_BTD, grad_BTF, strict=True)]
    )
    torch.testing.assert_close(row_norms_from_gram(gram(x_BTD), grad_BTF).double(), explicit, rtol=1e-6, atol=0)
    torch.testing.assert_close(row_norms_direct(x_BTD, grad_BTF, chunk=5).double(), explicit, rtol=1e-6, atol=0)


def test_a_sample_without_gradient_has_norm_zero(operands):
    x_BTD, grad_BTF = operands
    grad_BTF[1] = 0
    norms_BF = row_norms_from_gram(gram(x_BTD), grad_BTF)
    assert not norms_BF[1].any()
    assert norms_BF[0].all()


@pytest.mark.parametrize(
    ("hidden", "width", "length"), [(1024, 3072, 838), (2560, 9728, 2178), (4096, 14336, 3441)]
)  # Qwen3-0.6B, Qwen3-4B, Llama-3-8B
def test_the_products_change_over_at_equal_cost(hidden, width, length):
    assert round(break_even_length(hidden, width)) == length
    assert prefer_gram("auto", length - 1, hidden, width)
    assert not prefer_gram("auto", length + 1, hidden, width)
    assert prefer_gram("gram", 10 * length, hidden, width)
    assert not prefer_gram("direct", 1, hidden, width)
