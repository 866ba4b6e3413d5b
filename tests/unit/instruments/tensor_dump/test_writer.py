"""Host memory for captures is bounded."""

import threading
import time

from instruments.tensor_dump.writer import HostMemory


def test_waiting_ends_when_there_is_room():
    memory = HostMemory(512)
    assert memory.reserve(512)
    assert not memory.reserve(1)
    threading.Timer(0.05, memory.release, [512]).start()
    start = time.monotonic()
    assert memory.reserve(300, wait=True)
    assert time.monotonic() - start >= 0.04
    assert (memory.used, memory.most_used) == (300, 512)
