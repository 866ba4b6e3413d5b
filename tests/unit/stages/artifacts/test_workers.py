import re

import pytest
import torch
from integration.forked import as_workers

from instruments.errors import ConfigError
from stages.artifacts.job import ALONE, LostWorkerError, Table, Workers, find_workers
from stages.artifacts.rendering import in_mib, in_millions, in_time, render, show


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


def test_processes_of_a_machine_take_turns(tmp_path):
    def work(workers):
        with workers.in_turn():
            assert len([*tmp_path.iterdir()]) == workers.rank
            (tmp_path / str(workers.rank)).touch()

    as_workers(3, work)


def test_after_an_error_no_process_waits_for_the_others(monkeypatch):
    """NCCL would wait for their part in the end of the group, and they wait in another collective."""
    said = []
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(f"torch.distributed.{name}", lambda *_, name=name, **__: said.append(name))
    with pytest.raises(ZeroDivisionError), Workers(0, 2).connected():
        raise ZeroDivisionError
    assert said == ["init_process_group"]


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


def test_a_table_with_its_notes():
    rows = ((0, 1.23456789, 12345), (1, 2.0, 7), ("all", "+0.0500", None))
    assert render(Table("Neurons", ("layer", "loss", "tokens"), rows, ("a note", "another")), "github") == (
        "Neurons\n\n"
        "| layer   |    loss |   tokens |\n|---------|---------|----------|\n"
        "| 0       |   1.235 |   12,345 |\n| 1       |       2 |        7 |\n| all     | +0.0500 |        – |\n"
        "\na note\nanother"
    )
    assert render(Table("T", ("a",), ((1,),)), "simple") == "T\n\na\n---\n1"


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (show(True), "True"),
        (show(-12345), "-12,345"),
        (show(0.123456), "0.1235"),
        (show([1]), "[1]"),
        (in_mib(3 << 29), "1,536.0 MiB"),
        (in_millions(1_234_000), "1.23 M"),
        (in_millions(7_620_000_000), "7.62 B"),
        (in_time(12.34), "12.3 s"),
        (in_time(600), "10 min"),
        (in_time(7200), "2.0 h"),
    ],
)
def test_quantities(shown, wanted):
    assert shown == wanted


def test_a_lost_worker_in_other_code_is_said_in_words():
    lost = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"
    with pytest.raises(LostWorkerError, match="another worker of this job is gone"), Workers(0, 2).explained():
        raise RuntimeError(lost)
    for workers, text in ((Workers(0, 2), "out of memory"), (ALONE, lost)):
        with pytest.raises(RuntimeError, match=re.escape(text)), workers.explained():
            raise RuntimeError(text)
