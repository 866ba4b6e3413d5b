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
    other_launchers = ({"RANK": "1"}, {"RANK": "1", "MASTER_ADDR": "localhost"})
    assert all(find_workers(environment) == ALONE for environment in ({}, *other_launchers))
    assert ALONE.leads
    total = torch.tensor([3.0])
    with ALONE.connected():
        ALONE.reduce_(total)
    assert (ALONE.gather("word"), ALONE.broadcast("word"), total.item()) == (["word"], "word", 3.0)


def test_workers_that_cannot_meet_are_told_how_to_start(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError) as caught, Workers(1, 2, 1).connected():
        pass
    assert caught.value.what.startswith("the workers of this job cannot connect: Error initializing torch.distributed")
    assert caught.value.where == "environment RANK=unset, MASTER_ADDR=unset, MASTER_PORT=unset"
    assert caught.value.do.startswith("torchrun --nproc-per-node=2 -m pipeline ...")


def test_every_worker_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    # Two machines.
    assert [Workers(rank, 4, rank % 2, 2).pick_device("auto") for rank in range(4)] == [*["cuda:0", "cuda:1"] * 2]
    assert Workers(1, 2, 0, 1).pick_device("cuda:1") == "cuda:1"
    assert Workers(1, 4, 1, 4).pick_device("cpu") == "cpu"
    assert ALONE.pick_device("auto") == "auto"
    for asked, shared in (("auto", "2 GPUs"), ("cuda:1", "cuda:1")):  # NCCL would refuse the first sum, after the scan
        with pytest.raises(ConfigError, match=f"4 processes of this machine would share {shared}") as caught:
            Workers(3, 4, 3, 4).pick_device(asked)
        assert caught.value.where == f"model.device={asked}, torchrun --nproc-per-node=4"
        assert caught.value.do.startswith("model.device=auto with --nproc-per-node=2 or fewer")
