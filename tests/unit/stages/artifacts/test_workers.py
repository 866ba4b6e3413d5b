import pytest
import torch

from instruments.errors import ConfigError, UserError
from stages.artifacts.job import ALONE, Workers, find_workers


def test_torchrun_names_the_place():
    environment = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}
    workers = find_workers(environment)
    assert workers == Workers(rank=3, world=4, local_rank=1, local_world=4)
    assert find_workers(environment | {"LOCAL_WORLD_SIZE": "2"}).local_world == 2
    assert not workers.leads


def test_without_torchrun_a_process_is_alone():
    assert find_workers({}) == ALONE
    assert find_workers({"RANK": "1"}) == ALONE  # other launchers set RANK, too
    assert find_workers({"RANK": "1", "MASTER_ADDR": "localhost"}) == ALONE
    assert ALONE.leads


def test_workers_that_cannot_meet_are_told_how_to_start(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError) as caught, Workers(1, 2, 1).connected():
        pass
    what, where, do = str(caught.value).splitlines()
    assert what.startswith("the workers of this job cannot connect: Error initializing torch.distributed")
    assert where == "  where: environment RANK=unset, MASTER_ADDR=unset, MASTER_PORT=unset"
    assert do == "  do:    torchrun --nproc-per-node=2 -m pipeline ..., which sets them; without workers, unset RANK"


def test_every_worker_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    # Two machines.
    assert [Workers(rank, 4, rank % 2, 2).pick_device("auto") for rank in range(4)] == [*["cuda:0", "cuda:1"] * 2]
    assert Workers(1, 2, 0, 1).pick_device("cuda:1") == "cuda:1"
    assert Workers(1, 4, 1, 4).pick_device("cpu") == "cpu"
    assert ALONE.pick_device("auto") == "auto"


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ("auto", "4 processes of this machine would share 2 GPUs"),
        ("cuda:1", "4 processes of this machine would share cuda:1"),
    ],
)
def test_workers_do_not_share_a_gpu(asked, what, monkeypatch):
    """NCCL would refuse the first sum of their tensors, after the scan."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError) as caught:
        Workers(3, 4, 3, 4).pick_device(asked)
    assert str(caught.value) == (
        f"{what}\n  where: model.device={asked}, torchrun --nproc-per-node=4\n"
        "  do:    model.device=auto with --nproc-per-node=2 or fewer, or model.device=cpu"
    )


def test_alone_everything_is_its_own():
    total = torch.tensor([3.0])
    with ALONE.connected():
        ALONE.reduce_(total)
    assert ALONE.gather("word") == ["word"]
    assert ALONE.broadcast("word") == "word"
    assert total.tolist() == [3.0]
