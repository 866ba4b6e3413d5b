import torch

from stages.text.batches import TokenSequence, batch_sequences, group_lengths, split_batch

PAD = 9


def sequence_of(length):
    ids = list(range(100 * length, 100 * length + length))
    return TokenSequence(f"of {length}", ids, [-100, *ids[1:]])


def test_pads_on_the_right_and_masks_the_padding():
    (batch,) = batch_sequences([sequence_of(3), sequence_of(5)], batch_tokens=10, pad_id=PAD)
    assert batch.input_ids.tolist() == [[300, 301, 302, PAD, PAD], [500, 501, 502, 503, 504]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert batch.labels.tolist() == [[-100, 301, 302, -100, -100], [-100, 501, 502, 503, 504]]
    assert batch.names == ["of 3", "of 5"]


def test_every_batch_fits_padding_included_and_keeps_the_order():
    lengths = [3, 3, 2, 7, 2, 2, 2, 4, 13, 2]
    batches = batch_sequences([sequence_of(length) for length in lengths], batch_tokens=12, pad_id=PAD)
    assert [batch.names for batch in batches] == [
        ["of 3", "of 3", "of 2"],
        ["of 7"],
        ["of 2", "of 2", "of 2"],
        ["of 4"],
        ["of 13"],
        ["of 2"],
    ]
    assert all(batch.input_ids.numel() <= 12 for batch in batches if batch.names != ["of 13"])


def test_groups_of_neighbours():
    assert group_lengths([3, 3, 13, 2, 6, 7], 12) == [range(2), range(2, 3), range(3, 5), range(5, 6)]


def test_parts_are_padded_to_their_own_longest_sequence():
    (batch,) = batch_sequences([sequence_of(length) for length in (3, 2, 8)], 24, pad_id=0)
    short, long = split_batch(batch, 16)
    assert (short.input_ids.shape, long.input_ids.shape) == ((2, 3), (1, 8))
    assert short.tokens + long.tokens == batch.tokens
    assert [*short.names, *long.names] == batch.names
    assert short.labels.shape == short.attention_mask.shape == (2, 3)


def test_the_host_knows_how_much_of_a_mask_is_padding():
    for lengths in ([3, 5], [5, 5]):
        (batch,) = batch_sequences([sequence_of(length) for length in lengths], batch_tokens=10, pad_id=PAD)
        mask = batch.inputs(torch.device("cpu"))["attention_mask"]
        assert mask.tolist() == batch.attention_mask.tolist()
        # What transformers asks, of a mask that the host can read no more.
        asked = mask.to(device="meta", dtype=torch.bool)
        for same in (asked, asked[:, :5]):
            assert int(same.sum()) == sum(lengths)
            assert bool(same.all()) == (sum(lengths) == 10)
        assert type(mask * 2) is type(mask[:, :3]) is torch.Tensor
