"""The ring buffer in host memory has a fixed size."""

import threading
import time
from itertools import pairwise

import pytest
import torch

from instruments.tensor_dump.writer import ALIGNMENT, HostRing


@pytest.fixture
def ring():
    return HostRing(8 * ALIGNMENT, pinned=False)


def test_slots_do_not_overlap_and_begin_aligned(ring):
    slots = [ring.reserve(size) for size in (1, 100, 64)]
    assert [slot.begin for slot in slots] == [0, 64, 192]
    for number, slot in enumerate(slots):
        slot.data.fill_(number)
    assert [set(slot.data.tolist()) for slot in slots] == [{0}, {1}, {2}]


def test_room_is_used_again_in_turn(ring):
    first, second = ring.reserve(200), ring.reserve(200)
    assert ring.reserve(200) is None
    ring.release(first)
    third = ring.reserve(200)
    assert third.begin == 0
    assert ring.reserve(57) is None
    ring.release(third)  # newer than a slot that is still in use
    assert ring.reserve(100) is None
    ring.release(second)
    assert ring.used == 0
    assert ring.reserve(512).data.numel() == 512


def test_it_never_grows(ring):
    slots = []
    generator = torch.Generator().manual_seed(0)
    for size in torch.randint(1, 200, (500,), generator=generator).tolist():
        while (slot := ring.reserve(size)) is None:
            ring.release(slots.pop(0))
        slots.append(slot)
        spans = sorted((one.begin, one.end) for one in slots)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert spans[-1][1] <= ring.capacity
    assert ring.most_used <= ring.capacity


def test_waiting_ends_when_there_is_room(ring):
    slot = ring.reserve(512)
    threading.Timer(0.05, ring.release, [slot]).start()
    start = time.monotonic()
    assert ring.reserve(300, wait=True).data.numel() == 300
    assert time.monotonic() - start >= 0.04


def test_more_than_there_is(ring):
    assert ring.reserve(513) is None
