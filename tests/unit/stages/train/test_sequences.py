import torch

from stages.text.batches import TokenSequence
from stages.train.text import collate, order_sequences


def make(count):
    return [TokenSequence(str(number), [number] * (number + 2), [number] * (number + 2)) for number in range(count)]


def names(ordered):
    return [sequence.name for sequence in ordered]


def test_every_pass_reads_everything_once_in_an_order_of_its_own():
    read = names(order_sequences(make(7), 0, 21, seed=4))
    passes = [read[start : start + 7] for start in (0, 7, 14)]
    assert all(sorted(one) == sorted(passes[0]) for one in passes)
    assert len({tuple(one) for one in passes}) == 3


def test_a_later_phase_goes_on_where_the_earlier_one_stopped():
    whole = names(order_sequences(make(7), 0, 20, seed=4))
    assert names(order_sequences(make(7), 9, 11, seed=4)) == whole[9:]


def test_a_phase_may_be_shorter_than_a_pass():
    assert len(order_sequences(make(7), 12, 1, seed=0)) == 1
    assert len(order_sequences(make(3), 1, 5, seed=0)) == 5


def test_batches_are_padded_on_the_right():
    batch = collate(make(2), pad_id=9)
    assert torch.equal(batch["input_ids"], torch.tensor([[0, 0, 9], [1, 1, 1]]))
    assert torch.equal(batch["attention_mask"], torch.tensor([[1, 1, 0], [1, 1, 1]]))
    assert torch.equal(batch["labels"], torch.tensor([[0, 0, -100], [1, 1, 1]]))
