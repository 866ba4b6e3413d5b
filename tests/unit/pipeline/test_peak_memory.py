"""The peak of resident memory."""

import sys

import pytest

from pipeline.peak_memory import peak_bytes, start_measuring


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can reset the peak")
def test_the_peak_is_that_since_the_last_reset():
    size = 64 * 2**20
    start_measuring()
    before = peak_bytes()
    block = bytearray(size)
    block[::4096] = b"x" * len(block[::4096])
    assert peak_bytes() > before + 0.9 * size
    del block
    start_measuring()
    assert peak_bytes() < before + 0.5 * size
