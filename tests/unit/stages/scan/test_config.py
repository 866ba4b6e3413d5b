from stages.scan.config import ScanConfig


def test_tokens_of_a_batch_are_asked_for_or_as_the_device_likes_them():
    for asked, found in ((ScanConfig(), [1024, 2048, 2048]), (ScanConfig(batch_tokens=100), [100] * 3)):
        assert [asked.read_batch("cpu"), asked.read_batch("cuda"), asked.written_batch()] == found
