import pytest
import torch

from instruments.errors import UserError
from models.loading import explained_memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore"),
        MemoryError("too much"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
    ],
)
def test_too_little_memory_says_what_to_lower(error):
    with pytest.raises(UserError) as caught, explained_memory("stage=train", "lower it"):
        raise error
    assert caught.value.what == f"out of memory: {str(error).splitlines()[0]}"
    assert (caught.value.where, caught.value.do) == ("stage=train", "lower it")


def test_a_real_allocation_that_cannot_be_met_and_other_errors():
    with pytest.raises(UserError, match="out of memory"), explained_memory("here", "lower it"):
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="shapes"), explained_memory("here", "lower it"):
        raise RuntimeError("shapes do not match")
