import pytest
import torch
from safetensors import safe_open

from instruments.errors import ContractError
from instruments.safetensors_files import save_tensors
from stages.accumulators.sums import LocalStore, ScanSums

SHAPES = {"sum": ((2, 3), torch.float64), "max_abs": ((2, 3), torch.float64), "bits_LRf": ((2, 4, 1), torch.uint8)}


def open_store(folder, *, every=0.0, identity="one", **place):
    return LocalStore(folder, SHAPES, identity={"scan": identity}, every=every, **place)


def part(*numbers):
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in SHAPES.items()}
    for number in numbers:
        tensors["sum"] += number + 1 / 3
        tensors["max_abs"] = tensors["max_abs"].maximum(torch.full((2, 3), float(number), dtype=torch.float64))
        tensors["bits_LRf"][:, number] = number
    return ScanSums(tensors, {"tokens": 10 * len(numbers), "loss_sum": 0.5 * len(numbers)}, set(numbers))


def flushed(folder, *numbers, **place):
    store = open_store(folder, **place)
    store.sums.add(part(*numbers))
    store.flush()
    return store


def test_sums_and_their_batches_come_back_as_they_were(tmp_path):
    assert open_store(tmp_path, every=0.0).due()
    assert not open_store(tmp_path, every=3600.0).due()
    with safe_open(flushed(tmp_path, 0, 2).path, framework="pt") as file:
        assert set(file.keys()) == set(SHAPES)
    store = open_store(tmp_path)
    assert store.done() == {0, 2}
    store.sums.add(part(3))
    found = store.collect()
    assert torch.equal(found.tensors["sum"], part(0, 2, 3).tensors["sum"])
    assert (found.tensors["max_abs"] == 3).all()
    assert found.tensors["bits_LRf"][:, :, 0].tolist() == [[0, 0, 2, 3]] * 2
    assert found.counters == {"tokens": 30, "loss_sum": 1.5}
    assert found.done == {0, 2, 3}


def test_a_batch_cannot_count_twice(tmp_path):
    with pytest.raises(AssertionError, match="a batch would count twice"):
        flushed(tmp_path, 1).sums.add(part(1, 2))


def test_worker_0_takes_over_what_a_larger_team_left(tmp_path):
    for worker in range(3):
        flushed(tmp_path, worker, worker=worker, workers=3)
    first, second = (open_store(tmp_path, worker=worker, workers=2) for worker in range(2))
    assert (first.done(), second.done()) == ({0, 2}, {1})
    assert first.collect().done == {0, 2}
    assert open_store(tmp_path, worker=0, workers=2).done() == {0, 2}


def test_what_was_read_again_is_not_taken_over(tmp_path):
    """Worker 0 has scanned batch 1 again, as workers on other machines do: they cannot see worker 1's file."""
    for worker in range(3):
        flushed(tmp_path, worker, worker=worker, workers=3)
    flushed(tmp_path, 1, worker=0, workers=3)
    store = open_store(tmp_path)
    assert store.done() == {0, 1, 2}
    found, expected = store.collect(), part(0, 1, 2)
    assert (found.done, found.counters) == (expected.done, expected.counters)
    for name, tensor in expected.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name


def test_a_fresh_worker_forgets_what_it_left(tmp_path):
    flushed(tmp_path, 1, worker=1, workers=2, identity="another")
    store = open_store(tmp_path, worker=1, workers=2, fresh=True)
    assert store.done() == set()
    assert not store.path.exists()


def test_sums_of_other_code_are_refused(tmp_path):
    flushed(tmp_path, 0)
    with pytest.raises(ContractError, match="a scan with another scan") as caught:
        open_store(tmp_path, identity="another")
    assert caught.value.where == str(tmp_path / "sums.0.safetensors")
    assert caught.value.do.startswith("the same command with stage=scan fresh=true")


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-5]),
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\4"),
        lambda path: save_tensors(path, part(0).tensors),
        lambda path: save_tensors(path, part(0).tensors, done=3, counters={}),
    ],
)
def test_damaged_sums_are_refused(tmp_path, damage):
    damage(flushed(tmp_path, 0).path)
    with pytest.raises(ContractError, match="unfinished sums cannot be read"):
        open_store(tmp_path)
