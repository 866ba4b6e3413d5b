from stages.scan.passes import number_samples
from stages.text.batches import TokenSequence, batch_sequences


def test_samples_are_numbered_through_all_batches():
    lengths = [3, 3, 5, 2, 2, 2]
    batches = batch_sequences([TokenSequence("", [1] * length, [1] * length) for length in lengths], 6, 0)
    assert [len(batch.names) for batch in batches] == [2, 1, 3]
    assert number_samples(batches, {2, 0}) == [0, 1, 3, 4, 5]
    assert number_samples(batches, set()) == []
