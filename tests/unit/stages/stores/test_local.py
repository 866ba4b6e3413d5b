import torch

from stages.stores.local import LocalStore


def test_state_comes_back_as_it_was(tmp_path):
    store = LocalStore(tmp_path, every=0.0)
    assert store.load() is None
    tensors = {"sum": torch.tensor([1 / 3], dtype=torch.float64)}
    store.save_if_due(tensors, {"next_batch": 3, "loss_sum": 0.1})
    loaded, counters = LocalStore(tmp_path, every=0.0).load()
    assert torch.equal(loaded["sum"], tensors["sum"])
    assert counters == {"next_batch": 3, "loss_sum": 0.1}


def test_a_torn_write_leaves_the_old_state(tmp_path):
    store = LocalStore(tmp_path, every=0.0)
    store.save({"sum": torch.ones(2)}, {"next_batch": 1})
    (tmp_path / "sums.tmp").write_bytes(b"torn")
    assert store.load()[1] == {"next_batch": 1}


def test_nothing_is_written_before_it_is_due(tmp_path):
    store = LocalStore(tmp_path, every=3600.0)
    store.save_if_due({"sum": torch.ones(2)}, {"next_batch": 1})
    assert store.load() is None
