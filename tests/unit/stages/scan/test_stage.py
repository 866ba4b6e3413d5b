import torch

from stages.scan.stage import sums_cache_key
from stages.text.batches import TokenSequence, batch_sequences

IDS = [5, 6, 7, 8]


def identity(*sequences, batch_tokens=100, dtype=torch.float32, fingerprint="f1"):
    given = [TokenSequence("a sample", ids, labels) for ids, labels in sequences or [(IDS, IDS), (IDS[:3], IDS[:3])]]
    return sums_cache_key(fingerprint, batch_sequences(given, batch_tokens, 0), dtype)


def test_text_precision_and_settings_tell_scans_apart():
    assert identity() == identity()
    assert identity()["dtype"] == "float32"
    for other, changed in (
        (identity((IDS, IDS), ([5, 6, 9], [5, 6, 9])), "text"),
        (identity((IDS, IDS), (IDS[:3], [-100, 6, 7])), "text"),
        (identity((IDS, IDS), ([*IDS[:3], 0], [*IDS[:3], -100])), "text"),  # padding
        (identity(batch_tokens=4), "text"),
        (identity(dtype=torch.bfloat16), "dtype"),
        (identity(fingerprint="f2"), "scan"),
    ):
        assert {name for name, fact in identity().items() if other[name] != fact} == {changed}
