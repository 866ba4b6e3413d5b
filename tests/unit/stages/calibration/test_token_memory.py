"""Tensors of tokens on disk: equal values, unlinked files, and a clear message for a full disk."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from draws import draw
from pico import write_pico

from models.config import ModelConfig
from models.stream import LayerStream
from pipeline.disk import explain_os_error
from stages.artifacts.job import Job, Workers
from stages.calibration.batches import CalibrationContext, TokenStream, passed_losses
from stages.calibration.config import VocabularyConfig
from stages.calibration.share import take_rows
from stages.calibration.token_memory import (
    TokenMemory,
    as_it_is,
    control_group_rooms,
    free_memory,
    memory_limit,
    spill,
)
from stages.text.batches import TokenSequence, batch_sequences
from stages.text.config import DataConfig


def open_files():
    return len([*Path("/proc/self/fd").iterdir()])


def spilled_under(folder):
    """Paths of the files below it that this process has mapped; an unlinked file's path no longer exists."""
    lines = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    return [line[5] for line in lines if len(line) > 5 and line[5].startswith(str(folder))]


def test_a_spilled_tensor_is_a_tensor(tmp_path):
    x_TD = draw(7, 6)
    held_TD = spill(x_TD, tmp_path)
    assert torch.equal(held_TD, x_TD)
    assert held_TD.data_ptr() != x_TD.data_ptr()
    held_TD[2:4] = 5.0
    assert torch.equal(held_TD[2:4], torch.full((2, 6), 5.0))
    assert spill(x_TD[:0], tmp_path).shape == (0, 6)


def test_its_file_has_no_name_and_ends_with_it(tmp_path):
    before = open_files()
    held = [spill(draw(7, 6), tmp_path) for _ in range(3)]
    assert list(tmp_path.iterdir()) == []
    assert len(spilled_under(tmp_path)) == 3
    assert open_files() == before, "a pass of many batches would run out of files"
    del held
    assert spilled_under(tmp_path) == []


def test_what_has_room_stays_in_memory(tmp_path):
    memory, x_TD = TokenMemory(tmp_path, room=1000), draw(7, 6)
    assert memory.reserve(600)(x_TD) is x_TD
    assert memory.reserve(600)(x_TD) is not x_TD
    assert memory.reserve(400)(x_TD) is x_TD
    assert memory.reserve(1)(x_TD) is not x_TD


def test_the_limit_is_the_setting_or_half_of_what_is_free():
    assert memory_limit(ModelConfig(hidden_memory="1.5GiB")) == 1.5 * 2**30
    assert memory_limit(ModelConfig(hidden_memory="20 kb")) == 20_000
    assert memory_limit(ModelConfig(hidden_memory="0GB")) == 0
    assert memory_limit(ModelConfig(), 4) == pytest.approx(free_memory() / 8, rel=0.2)


def write_group(folder, limit, used, droppable):
    """Files of a control group."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {droppable}\n")


def test_the_memory_of_a_container_or_a_job_is_its_limit(tmp_path):
    """A job of Slurm (its path is visible), a container (only its own group is), and no limit at all."""
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    write_group(root / "job/step", 700, 500, 90)
    write_group(root / "job", "max", 600, 90)
    membership.write_text("0::/job/step\n")
    assert [*control_group_rooms(root, membership)] == [290]
    write_group(root / "job", 620, 600, 7)
    assert sorted(control_group_rooms(root, membership)) == [27, 290]
    write_group(tmp_path / "container", 400, 450, 20)
    membership.write_text("0::/kubepods/pod/of-the-host\n")
    assert [*control_group_rooms(tmp_path / "container", membership)] == [0]
    assert [*control_group_rooms(root, tmp_path / "absent")] == []


def test_control_groups_of_version_1_have_limits_too(tmp_path):
    group, membership = tmp_path / "cgroup/memory/slurm/job", tmp_path / "membership"
    group.mkdir(parents=True)
    for name, text in {"limit_in_bytes": "700", "usage_in_bytes": "500", "stat": "total_inactive_file 90"}.items():
        (group / f"memory.{name}").write_text(f"{text}\n")
    membership.write_text("9:cpu,memory:/slurm/job\n8:devices:/\n0::/init\n")
    assert [*control_group_rooms(tmp_path / "cgroup", membership)] == [290]


def test_the_processes_of_a_machine_share_its_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("stages.calibration.token_memory.free_memory", lambda: 4000)
    job = Job({}, tmp_path, tmp_path, workers=Workers(rank=0, world=8, local_rank=0, local_world=2))
    data = DataConfig(tokens=96, max_length=32)
    context = CalibrationContext.of(ModelConfig(), data, VocabularyConfig(tokens=0), 0, job, 64)
    assert context.memory.reserve(1000) is as_it_is
    assert context.memory.reserve(1) is not as_it_is


@pytest.mark.parametrize(("block", "tokens"), [(2**25, 64), (40 * 4 * 1024, 32)])
def test_a_batch_has_activations_that_the_process_keeps(tmp_path, monkeypatch, block, tokens):
    monkeypatch.setattr("stages.calibration.batches.KEPT_BLOCK", block)  # the FFNs have 1,024 neurons
    data = DataConfig(tokens=1024, max_length=32)
    context = CalibrationContext.of(ModelConfig(), data, VocabularyConfig(tokens=0), 0, Job({}, tmp_path, tmp_path), 64)
    assert {batch.input_ids.numel() for batch in context.batches} == {tokens}


def test_rows_are_those_of_one_tensor():
    batches = [draw(size, 6, seed=size) for size in (3, 0, 5, 1)]
    rows_t = torch.tensor([8, 0, 3, 3, 2, 7, 0])
    assert torch.equal(take_rows(batches, rows_t), torch.cat(batches)[rows_t])


@pytest.fixture(scope="module")
def passed(tmp_path_factory):
    """Run a pass with a memory limit; return FFN inputs and outputs, the loss and the count of spilled tensors."""
    folder = write_pico(tmp_path_factory.mktemp("source"), "qwen3", layers=3)
    rows = [draw(size, seed=size).mul(20).abs().long().clamp(1, 60).tolist() for size in (9, 5, 7, 9)]
    batches = batch_sequences([TokenSequence(str(index), row, row) for index, row in enumerate(rows)], 18, 0)

    def run(room, scratch):
        with LayerStream(folder, device=torch.device("cpu")) as stream:
            tokens, found = TokenStream(stream, batches, memory=TokenMemory(scratch, room)), []
            for layer in stream.layers():
                tokens.enter(layer)
                wanted = tokens.inputs.map(layer.ffn)
                held = len(spilled_under(scratch))
                found += [part.clone() for part in (*tokens.inputs, *wanted)]
                tokens.leave(wanted)
            return found, passed_losses({"": tokens}, stream, batches)[""], held

    return run


def test_a_pass_is_the_same_to_the_last_bit(passed, tmp_path):
    inside, loss, held = passed(10**9, tmp_path)
    assert held == 0
    outside, other_loss, held = passed(0, tmp_path)
    assert held == 3 * 2, "hidden states, inputs and outputs of two batches"
    assert all(map(torch.equal, inside, outside))
    assert loss == other_loss


def child(work):
    """Run `work` in a forked child; return its exit code, or minus its signal."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = work() or 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path)]
    try:
        subprocess.run(mount, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a small disk of its own needs root: {getattr(error, 'stderr', error)}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_full_disk_is_an_error_in_words(small_disk):
    def work():
        held = [spill(draw(100, 60), small_disk)]
        try:
            held += [spill(draw(100, 60), small_disk) for _ in range(4)]
        except OSError as error:
            said = explain_os_error(error, where="stage=project", folder=small_disk)
            return 7 if str(said).startswith("no room left on the disk: ") else 8

    assert child(work) == 7, "the process ended by another error, or by a signal"
