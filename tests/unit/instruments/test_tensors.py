import pytest
import torch

from instruments.tensors import to_host


def test_tensors_on_the_host_keep_values_shapes_and_formats():
    tensors = [
        torch.randn(3, dtype=torch.float64),
        torch.tensor([True, False, True]),
        torch.randn(2, 5).T,
        torch.zeros(0, 7, dtype=torch.uint8),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.randn(1, dtype=torch.float64, requires_grad=True),
    ]
    found = to_host(tensors)
    assert all(torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(found, tensors, strict=True))
    assert not any(tensor.requires_grad for tensor in found)
    assert to_host([]) == []


@pytest.mark.gpu
def test_one_transfer_per_device():
    tensors = [torch.randn(3, device="cuda"), torch.arange(5, device="cuda")]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        found = to_host(tensors)
    assert [tensor.device.type for tensor in found] == ["cpu", "cpu"]
    assert sum(event.count for event in profile.key_averages() if "DtoH" in event.key) == 1
