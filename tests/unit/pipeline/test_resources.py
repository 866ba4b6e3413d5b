"""What stages are expected to need: memory with its remedies, hidden states on disk, and times of earlier runs."""

import sys
from dataclasses import replace
from unittest.mock import Mock

import pytest

from models.config import ModelConfig
from models.targets.config_json import count_dense
from pipeline.check import validate
from pipeline.cli import run_command
from pipeline.resources import (
    count_tokens,
    estimate_seconds,
    hidden_bytes,
    measured_peak,
    memory_warnings,
    peak_bytes,
    record_seconds,
    start_measuring,
)
from pipeline.run import Runner
from pipeline.settings import compose

CHAIN = ("scan", "score", "cluster", "extract", "assemble", "project", "evaluate")


@pytest.fixture
def checked(tmp_path):
    """Function that checks the settings of a command line."""
    return lambda *words: validate(compose([*words, f"output_dir={tmp_path}"])[0])


@pytest.fixture
def free(monkeypatch):
    """Function that sets the free memory of this machine, in MiB."""
    return lambda size: monkeypatch.setattr("pipeline.resources.free_memory", lambda: size * 2**20)


def test_more_text_is_read_where_it_is_used(checked):
    few, many = (checked(f"data.tokens={count}") for count in (65536, 131072))
    same = ("scan", "score", "cluster", "extract", "assemble")  # these read the first 16,384 tokens at most
    assert all(count_tokens(stage, many) == count_tokens(stage, few) for stage in same)
    for stage in ("project", "evaluate"):
        assert count_tokens(stage, many) > 1.1 * count_tokens(stage, few)
        assert peak_bytes(stage, many) > 1.1 * peak_bytes(stage, few)
    assert count_tokens("scan", few) == 2 * count_tokens("scan", checked("data.sample_tokens=8192"))


@pytest.mark.parametrize(
    ("stage", "remedy"),
    [
        ("scan", "scan.batch_tokens=256 scan.gradient_checkpointing=true"),
        (
            "project",
            "project.gradient_checkpointing=true, or project.gradient_projection=false, or model.hidden_memory=0GB",
        ),
        ("cluster", "model.hidden_memory=0GB"),
        ("train", "train.micro_batch=1 train.gradient_checkpointing=true"),
    ],
)
def test_too_little_memory_warns_with_settings_that_need_less(checked, free, stage, remedy):
    run = checked("stage=train", "data.tokens=262144", "data.sample_tokens=262144")
    free(4096)
    assert list(memory_warnings(run, [stage])) == []
    free(800)
    (said,) = memory_warnings(run, [stage])
    what, do = said.splitlines()
    assert what.startswith(f"stage={stage} needs about ")
    assert what.endswith(" of memory, 800.0 MiB are free")
    assert do.startswith(f"  do:    {remedy}")
    smaller = checked("stage=train", "data.tokens=262144", *remedy.replace(", or", "").split())
    assert peak_bytes(stage, smaller) < peak_bytes(stage, run)
    free(1)
    assert list(memory_warnings(run, [])) == []


def test_a_trained_router_needs_memory_for_every_pair_of_experts(checked):
    pairs = 8 * 8192 * 400**2
    many = ("experts=400", "n=8", "project.gradient_projection=false")
    for stage, word in (("assemble", "assemble.router_steps=200"), ("project", "project.rounds=1")):
        few = peak_bytes(stage, checked(*many, word.partition("=")[0] + "=0"))
        assert few < pairs < peak_bytes(stage, checked(*many, word)) < few + pairs


def test_the_memory_of_a_gpu_holds_the_tensors_alone(checked, monkeypatch):
    host = checked()
    gpu = replace(host, settings=replace(host.settings, model=ModelConfig(device="cuda")))
    needed = peak_bytes("extract", host)
    assert peak_bytes("extract", gpu) == needed - peak_bytes("score", host) < needed
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _device: (peak_bytes("project", gpu) - 1, 2**40))
    (said,) = memory_warnings(gpu, ["project"])
    assert "of GPU memory, " in said
    monkeypatch.delattr("torch.cuda.mem_get_info")  # a device that does not tell
    assert not list(memory_warnings(gpu, ["project"]))


def test_hidden_states_above_the_limit_are_on_disk(checked):
    words = ("data.tokens=131072", "vocabulary=none")
    inside, outside = (checked(*words, f"model.hidden_memory={room}GB") for room in (100, 0))
    for stage, tokens in (("scan", 0), ("cluster", 16384), ("project", 131072)):
        kept = 4 * 4 * 256 * tokens
        assert hidden_bytes(stage, inside) == (kept, 0)
        assert hidden_bytes(stage, outside) == (0, kept)


def test_the_last_run_of_a_stage_gives_its_time(checked):
    run, twice = (checked(f"data.sample_tokens={count}") for count in (1000, 2000))
    guess, other = estimate_seconds("scan", run), estimate_seconds("project", run)
    record_seconds("scan", run, 100 * guess)
    assert estimate_seconds("scan", run) == pytest.approx(100 * guess)
    assert estimate_seconds("scan", twice) == pytest.approx(200 * guess)
    assert estimate_seconds("project", run) == other
    record_seconds("scan", twice, 30.0)
    assert estimate_seconds("scan", run) == pytest.approx(15)


def test_the_run_of_a_small_model_says_nothing_of_a_large_one(checked, monkeypatch):
    run = checked()
    larger = Mock(return_value=Mock(total=100 * count_dense(run.source).total))
    with monkeypatch.context() as patched:
        patched.setattr("pipeline.resources.count_dense", larger)
        guess = estimate_seconds("project", run)
    record_seconds("project", run, 1e6)
    monkeypatch.setattr("pipeline.resources.count_dense", larger)
    assert estimate_seconds("project", run) == guess


@pytest.mark.parametrize("content", ["{", "[]", '{"cpu scan": [[3, 1]]}', '{"cpu scan": NaN}', None])
def test_a_damaged_file_of_times_is_replaced(checked, tmp_path, content):
    run = checked()
    guess, path = estimate_seconds("scan", run), tmp_path / "rates.json"
    if content is None:  # a folder: times that cannot be kept stop no run
        path.mkdir()
    else:
        path.write_text(content)
    assert estimate_seconds("scan", run) == guess
    record_seconds("scan", run, 9.0)
    assert estimate_seconds("scan", run) == pytest.approx(guess if content is None else 9)


def test_a_plan_runs_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Runner, "run", lambda *_: pytest.fail("a stage ran"))
    assert run_command(["plan=true", f"output_dir={tmp_path}"]) == 0
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.split() and line.split()[0] in CHAIN}
    assert set(rows) == set(CHAIN)
    assert rows["scan"][1:5] == ["runs:", "no", "result", "yet"]
    assert rows["scan"][-1] == "s"
    assert not (tmp_path / "runs").exists()
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} <= {"hashes.json"}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can reset the peak")
def test_the_peak_is_that_since_the_last_reset():
    size = 64 * 2**20
    start_measuring()
    before = measured_peak()
    block = bytearray(size)
    block[::4096] = b"x" * len(block[::4096])
    assert measured_peak() > before + 0.9 * size
    del block
    start_measuring()
    assert measured_peak() < before + 0.5 * size
