import torch

from stages.scan.stage import sums_cache_key
from stages.text.batches import TokenSequence, batch_sequences

IDS = [5, 6, 7, 8]


def identity(*sequences, batch_tokens=100, dtype=torch.float32, fingerprint="f1"):
    given = [TokenSequence("a sample", ids, labels) for ids, labels in sequences or [(IDS, IDS), (IDS[:3], IDS[:3])]]
    return sums_cache_key(fingerprint, batch_sequences(given, batch_tokens, 0), dtype)


def differing(other):
    return {name for name, fact in identity().items() if other[name] != fact}


def test_the_same_scan_is_the_same():
    assert identity() == identity()


def test_other_tokens_labels_padding_or_batches_are_another_text():
    assert differing(identity((IDS, IDS), ([5, 6, 9], [5, 6, 9]))) == {"text"}
    assert differing(identity((IDS, IDS), (IDS[:3], [-100, 6, 7]))) == {"text"}
    assert differing(identity((IDS, IDS), ([*IDS[:3], 0], [*IDS[:3], -100]))) == {"text"}
    assert differing(identity(batch_tokens=4)) == {"text"}


def test_precision_and_settings_are_told_apart():
    assert identity()["dtype"] == "float32"
    assert differing(identity(dtype=torch.bfloat16)) == {"dtype"}
    assert differing(identity(fingerprint="f2")) == {"scan"}
