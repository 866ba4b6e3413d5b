import pytest
import torch
from operator_counts import count_operators

from instruments import device
from instruments.gradients import (
    block_squares,
    column_squares,
    gram_matrix,
    prefer_gram,
    sample_grams,
    weight_squares,
)

B, T, INPUTS, OUTPUTS = 3, 7, 6, 13


@pytest.fixture
def operands():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(B, T, INPUTS, generator=generator), torch.randn(B, T, OUTPUTS, generator=generator)


def explicit(x_BTI, grad_BTO):
    squares_BOI = torch.einsum("bto,bti->boi", grad_BTO.double(), x_BTI.double()).square()
    return squares_BOI.sum(1), squares_BOI.sum(2)


@pytest.mark.parametrize("gram", [True, False])
@pytest.mark.parametrize("wide", [False, True])
def test_columns_and_rows_equal_the_explicit_gradient(operands, gram, wide):
    x, grad = operands if not wide else reversed(operands)
    for found, truth in zip(weight_squares(x, grad, gram=gram), explicit(x, grad), strict=True):
        torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=0)
    torch.testing.assert_close(column_squares(x, grad, gram=gram).double(), explicit(x, grad)[0], rtol=1e-5, atol=0)


def test_products_larger_than_the_budget_are_done_in_chunks(operands, monkeypatch):
    x, grad = operands
    monkeypatch.setattr("instruments.gradients._CACHE_FLOATS", 3 * INPUTS)  # 13 rows in chunks of 3, 3, 3, 3, 1
    for found, truth in zip(weight_squares(x, grad, gram=False), explicit(x, grad), strict=True):
        torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=0)


@pytest.mark.parametrize("gram", [True, False])
def test_half_precision_is_multiplied_in_fp32(operands, gram):
    x, grad = (tensor.bfloat16() for tensor in operands)
    for found, truth in zip(weight_squares(x, grad, gram=gram), explicit(x, grad), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=0)


def test_a_known_gram_matrix_is_used(operands):
    x, grad = operands
    _, rows = weight_squares(x, grad, gram=True, gram_BTT=4 * gram_matrix(x))
    torch.testing.assert_close(rows.double(), 4 * explicit(x, grad)[1], rtol=1e-5, atol=0)


def test_the_cheaper_product():
    assert prefer_gram("auto", 64, 1024, 3072)
    assert not prefer_gram("auto", 2048, 1024, 3072)
    assert not prefer_gram("auto", 896, 1024, 100_000)
    assert prefer_gram("auto", 896, 1024, 100_000, rows=False)
    assert prefer_gram("gram", 2048, 1024, 3072)
    assert not prefer_gram("direct", 1, 1024, 3072)


@pytest.mark.parametrize(("inputs", "outputs"), [(70, 35), (35, 70)])
@pytest.mark.parametrize("length", [9, 130, 131])  # one piece, equal halves, unequal halves
@pytest.mark.parametrize("widths", [(16, 24), (64, 16), (7, 64)])  # 7 is too narrow for the product by blocks
@pytest.mark.parametrize("hosts", [{"cpu"}, set()])
def test_blocks_of_a_weight_gradient(inputs, outputs, length, widths, hosts, monkeypatch):
    monkeypatch.setattr(device, "HOSTS", hosts)
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(B, length, n, generator=generator, dtype=torch.float64) for n in (inputs, outputs))
    product = grad.mT @ x
    expected = [
        torch.stack([part.square().sum((1, 2)) for part in product.split(width, dim)], 1)
        for width, dim in zip(widths, (2, 1), strict=True)
    ]
    x, grad = x.float(), grad.float()
    for way in ("gram", "direct", "auto"):
        found = block_squares(x, grad, widths, product=way, gram=lambda: sample_grams(x))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=0)


@pytest.mark.parametrize("way", ["gram", "direct"])
@pytest.mark.parametrize("number_format", [torch.float32, torch.bfloat16])
def test_the_norms_of_a_linear_have_at_most_14_operators_for_any_number_of_samples(way, number_format, monkeypatch):
    monkeypatch.setattr(device, "HOSTS", set())
    counts = set()
    for samples in (2, 5):
        x, grad = (torch.ones(samples, 40, width, dtype=number_format) for width in (48, 96))
        found = count_operators(block_squares, x, grad, (16, 24), product=way, gram=lambda x=x: sample_grams(x))
        assert not found.waits
        counts.add(found.started.total())
    (count,) = counts
    # A GPU needs no conversion for the two Gram matrices.
    assert count <= 14 + 2 * (number_format != torch.float32 and way == "gram")
