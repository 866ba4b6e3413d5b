"""Host memory for captures: bounded, and used again."""

import threading
import time

import pytest
import torch

from instruments.tensor_dump.writer import HostMemory


@pytest.fixture
def memory():
    return HostMemory(512, pinned=False)


def test_blocks_in_use_and_released_ones_never_exceed_the_capacity(memory):
    blocks, generator = [], torch.Generator().manual_seed(0)
    for size in torch.randint(1, 200, (500,), generator=generator).tolist():
        while (block := memory.reserve(size)) is None:
            memory.release(blocks.pop(0))
        blocks.append(block)
        assert block.numel() == size
        assert sum(one.nbytes for one in blocks) == memory.used <= memory._allocated <= memory.capacity
    assert memory.most_used <= memory.capacity


def test_waiting_ends_when_there_is_room(memory):
    block = memory.reserve(512)
    threading.Timer(0.05, memory.release, [block]).start()
    start = time.monotonic()
    assert memory.reserve(300, wait=True).numel() == 300
    assert time.monotonic() - start >= 0.04


def test_blocks_are_apart_and_used_again(memory):
    first, second = memory.reserve(200), memory.reserve(200)
    first.fill_(1)
    second.fill_(2)
    assert (set(first.tolist()), memory.reserve(200), memory.reserve(513)) == ({1}, None, None)
    memory.release(first)
    assert memory.reserve(200).data_ptr() == first.data_ptr()
    assert memory.used == 400
