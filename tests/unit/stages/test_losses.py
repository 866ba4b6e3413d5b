import pytest
import torch
from torch.nn import functional

from stages import losses as module
from stages.losses import MeanLoss, cross_entropy, supervised_tokens, token_losses

B, T, N, V = 2, 5, 11, 7


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four chunks; the last is smaller."""
    monkeypatch.setattr(module, "CHUNK_VALUES", 3 * V)


def example(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    targets_N = torch.randint(V, (N,))
    targets_N[[0, 4, 5]] = -100
    return (3 * torch.randn(N, V)).to(dtype), targets_N, torch.rand(N)


@pytest.mark.parametrize("inplace_backward", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_losses_and_gradients_are_torchs(dtype: torch.dtype, tolerance: float, inplace_backward: bool):
    logits_NV, targets_N, weights_N = example(dtype)
    expected, found = (logits_NV.clone().requires_grad_() for _ in range(2))
    reference_N = functional.cross_entropy(expected.float(), targets_N, reduction="none")
    (reference_N * weights_N).sum().backward()
    losses_N = cross_entropy(found * 1, targets_N, inplace_backward=inplace_backward)
    (losses_N * weights_N).sum().backward()
    assert losses_N.dtype == torch.float32
    torch.testing.assert_close(losses_N, reference_N)
    torch.testing.assert_close(found.grad, expected.grad, rtol=tolerance, atol=tolerance)
    assert not found.grad[[0, 4, 5]].any()


def test_logits_are_written_over_only_where_they_are_spent():
    logits_NV, targets_N, _ = example()
    for inplace_backward in (False, True):
        outputs_NV = logits_NV.clone().requires_grad_() * 1
        cross_entropy(outputs_NV, targets_N, inplace_backward=inplace_backward).sum().backward()
        assert torch.equal(outputs_NV, logits_NV) == (not inplace_backward)


@pytest.mark.parametrize(("free", "rows"), [(None, 3), (0, 3), (2 * 12 * V * 5, 5), (10**9, 8)])
def test_chunks_grow_with_the_free_memory_of_a_gpu(free: int | None, rows: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "GPU_CHUNK_VALUES", 8 * V)
    monkeypatch.setattr(module, "free_device_memory", lambda _device: free)
    logits_NV, targets_N, _ = example()
    expected = functional.cross_entropy(logits_NV, targets_N, reduction="none")
    taken = []

    def of_chunk(logits_nV: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        taken.append(len(logits_nV))
        return plain(logits_nV, *args, **options)

    plain = functional.cross_entropy
    monkeypatch.setattr(functional, "cross_entropy", of_chunk)
    torch.testing.assert_close(cross_entropy(logits_NV, targets_N), expected)
    assert taken == [min(rows, N - first) for first in range(0, N, rows)]


def test_losses_are_shifted_masked_and_averaged_per_sample():
    logits = torch.randn(B, T, V, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, 2, 3, 4, 5], [-100, -100, 6, 1, -100]])
    losses = token_losses(logits, labels)
    log_probabilities = logits.log_softmax(-1)
    assert float(losses[0, 0]) == pytest.approx(-float(log_probabilities[0, 0, 2]), rel=1e-5)
    assert losses[1].nonzero()[:, 0].tolist() == [1, 2]
    assert supervised_tokens(labels).tolist() == [4, 2]


def test_the_error_of_a_gap_is_the_spread_of_repeated_texts():
    """Over many texts of sequences drawn at random, the gap's standard deviation is about its estimate on each."""
    generator = torch.Generator().manual_seed(0)
    gaps, errors = [], []
    for _ in range(400):
        tokens = torch.randint(5, 40, (60,), generator=generator)
        dense = tokens * 3 + torch.randn(60, generator=generator) * 20  # differs far more than the gap
        carved = dense + tokens * 0.1 + torch.randn(60, generator=generator)
        losses = [
            MeanLoss(
                float(sums.sum()),
                int(tokens.sum()),
                None,
                None,
                tuple(zip(sums.tolist(), tokens.tolist(), strict=True)),
            )
            for sums in (dense, carved)
        ]
        gaps.append(losses[1].nats - losses[0].nats)
        errors.append(losses[1].gap_error(losses[0]))
    assert torch.tensor(errors).mean() == pytest.approx(float(torch.tensor(gaps).std()), rel=0.1)


def test_one_sequence_has_no_error():
    alone = MeanLoss(30.0, 10, None, None, ((30.0, 10),))
    assert alone.gap_error(alone) is None
    assert MeanLoss(30.0, 10).gap_error(alone) is None
