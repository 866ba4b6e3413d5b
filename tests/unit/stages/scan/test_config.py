"""Tokens per batch."""

import pytest

from stages.scan.config import ScanConfig


@pytest.mark.parametrize(("device_type", "read"), [("cpu", 1024), ("cuda", 2048)])
def test_an_open_batch_is_as_the_device_likes_it(device_type, read):
    assert ScanConfig().read_batch(device_type) == read
    assert ScanConfig().written_batch() == 2048


def test_an_asked_batch_is_taken_on_every_device():
    asked = ScanConfig(batch_tokens=100)
    assert [asked.read_batch("cpu"), asked.read_batch("cuda"), asked.written_batch()] == [100, 100, 100]
