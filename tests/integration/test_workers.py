"""Several processes give the results of one, and lose nothing when one of them dies."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from integration.carving import published, words_of_pico, write_source
from integration.forked import run_workers
from pico import write_pico
from safetensors.torch import load_file

from instruments.errors import FAILED, INVALID
from pipeline.cli import run_command
from stages.artifacts.job import GO_ON
from stages.scan.passes import Scanner

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A scan of 7 batches, the last a small one."""
    return [
        *("stage=scan", *write_source(tmp_path_factory.mktemp("source"), 300)),
        *("data.tokens=630", "data.heldout_tokens=100"),
        *("data.max_length=50", "scan.batch_tokens=100", "scan.reservoir_tokens=40", "store.checkpoint_every=0"),
    ]


def torchrun(workers, outputs, words, program=("-m", "pipeline"), limit=300, place="--standalone"):
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={workers}", place, *program]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [*map(str, start), *words, f"output_dir={outputs}"]
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=limit, check=False
    )


def statistics(outputs):
    return load_file(published(outputs, "scan") / "statistics.safetensors")


def assert_equal(found, expected):
    """Compare bit for bit, except float64 sums, which depend on the order of summation."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if tensor.dtype == torch.float64 and name != "max_abs":
            torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=0)
        else:
            assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def alone(words, tmp_path_factory):
    """Statistics of one process with one thread, like torchrun's workers: more threads sum in another order."""
    outputs, threads = tmp_path_factory.mktemp("alone"), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert run_command([*words, f"output_dir={outputs}"]) == 0
    finally:
        torch.set_num_threads(threads)
    return statistics(outputs)


def test_two_processes_equal_one(words, alone, tmp_path):
    found = run_workers(2, [*words, f"output_dir={tmp_path}"], tmp_path / "said")
    assert [code for code, _ in found] == [0, 0], found
    assert "630 tokens in 13 samples" in found[0][1]
    assert sum(said.count("scan      done in") for _, said in found) == 1  # only one process reports
    assert_equal(statistics(tmp_path), alone)
    assert not list((tmp_path / "artifacts" / "pico" / "scan").glob(".*"))


@pytest.fixture(scope="module")
def lost(words, tmp_path_factory):
    """The outputs of a job that lost a worker."""
    outputs, left = tmp_path_factory.mktemp("lost"), count(2, -1)
    original = Scanner.scan

    def scan(*args, **kwargs):
        """Worker 1 kills itself before its third batch, once worker 0 has flushed."""
        if not next(left) and os.environ["RANK"] == "1":
            while not [*outputs.glob("artifacts/pico/scan/.*/scratch/sums.0.safetensors")]:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    with patch.object(Scanner, "scan", scan):
        (code, said), (died, _) = run_workers(2, [*words, f"output_dir={outputs}"], tmp_path_factory.mktemp("said"))
    assert (code, died) == (FAILED, -signal.SIGKILL)
    assert GO_ON in said
    scratch = next((outputs / "artifacts" / "pico" / "scan").glob(".*/scratch"))
    assert {path.name for path in scratch.glob("*.safetensors")} == {"sums.0.safetensors", "sums.1.safetensors"}
    return outputs


@pytest.mark.parametrize("later", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_lost_worker_stops_the_job_and_another_team_finishes_it(words, alone, lost, tmp_path, later):
    outputs = shutil.copytree(lost, tmp_path / "outputs")
    (code, said), *others = run_workers(later, [*words, f"output_dir={outputs}"], tmp_path / "said")
    assert [code, *(other for other, _ in others)] == [0] * later, said
    assert "went on from an earlier run at token" in said
    assert_equal(statistics(outputs), alone)


@pytest.mark.parametrize(
    ("word", "code", "once"),
    [("scan.batch_tokens=0", INVALID, "scan.batch_tokens=0 must be at least 1"), ("plan=true", 0, "all stages ")],
)
def test_wrong_settings_and_the_plan_are_said_once(words, tmp_path, word, code, once):
    found = run_workers(2, [*words, word, f"output_dir={tmp_path / 'outputs'}"], tmp_path)
    assert found[0][0] == code
    assert sum(said.count(once) for _, said in found) == 1
    assert not [*tmp_path.glob("outputs/artifacts/pico/*")]


@pytest.mark.slow
def test_the_jobs_of_a_sweep_follow_each_other(words, tmp_path):
    """Without `--standalone`, the workers' meeting place is the leading worker's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"--master-port={server.getsockname()[1]}"
    done = torchrun(2, tmp_path, ["-m", *words, "seed=0,1"], place=place, limit=240)
    assert done.returncode == 0, done.stderr
    assert len([*tmp_path.glob("artifacts/pico/scan/[!.]*/manifest.json")]) == 2


@pytest.mark.slow
def test_a_job_of_a_sweep_that_fails_ends_it_in_its_own_words(words, tmp_path):
    (tmp_path / "artifacts/one").mkdir(parents=True)
    (tmp_path / "artifacts/one/score").write_text("no folder")
    done = torchrun(2, tmp_path, ["-m", *words, "stage=score", "model.label=one,two"], limit=240)
    assert done.returncode != 0
    assert "stage=score" in done.stderr
    assert "does not find the results" not in done.stderr


# The command, but worker 1 kills itself before the n-th call of a function that all workers call.
DYING_LATER = """
import os, signal, sys
from importlib import import_module
from unittest.mock import patch

target, calls, *words = sys.argv[1:]
owner, _, name = target.rpartition(".")
place, _, kind = owner.partition(":")
holder = getattr(import_module(place), kind) if kind else import_module(place)
original, left = getattr(holder, name), [int(calls)]

def counted(*args, **kwargs):
    left[0] -= 1
    if not left[0] and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)

from pipeline.cli import run_command
from pipeline.__main__ import leave
with patch.object(holder, name, counted):
    leave(run_command(words))
"""
CARVED = ("cluster", "assemble", "project", "evaluate")


@pytest.fixture(scope="module")
def chain(text, tmp_path_factory):
    """The command line of a whole run, and its outputs from one process with one thread."""
    folder = tmp_path_factory.mktemp("chain")
    given = words_of_pico(write_pico(folder / "pico", "qwen3", layers=3, tokenizer=True), text)
    dials = ("experts=4", "n=8", "top_k=2", "always_on=8", "cluster.map_layers=[1]", "model.rounded_products=false")
    random = ("vocabulary.tokens=300", "vocabulary.layers=2")
    baselines = ("evaluate.baselines=[static_mask_aligned,oracle,cmoe]", "evaluate.speed_tokens=100")
    words = [*given, *dials, *random, *baselines]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert run_command([*words, f"output_dir={folder / 'alone'}"]) == 0
    finally:
        torch.set_num_threads(threads)
    return words, folder / "alone"


def assert_same_carve(outputs, alone, stages=CARVED):
    """Compare weights and evaluation to 1e-6, indices of neurons and pictures exactly."""
    for stage in stages:
        found, expected = published(outputs, stage), published(alone, stage)
        assert found.name == expected.name
        files = sorted(path.relative_to(expected) for path in expected.rglob("*") if path.suffix != ".json")
        assert files == sorted(path.relative_to(found) for path in found.rglob("*") if path.suffix != ".json")
        for path in (path for path in files if path.suffix == ".safetensors"):
            ours, theirs = load_file(found / path), load_file(expected / path)
            assert ours.keys() == theirs.keys()
            for name, tensor in theirs.items():
                torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-6, msg=f"{stage} {path} {name}")
        for path in (path for path in files if path.suffix == ".png"):
            assert (found / path).read_bytes() == (expected / path).read_bytes()
    ours, theirs = (
        json.loads((published(each, "evaluate") / "evaluation.json").read_text()) for each in (outputs, alone)
    )
    assert ours["models"].keys() == theirs["models"].keys()
    for name, model in theirs["models"].items():
        for figure in ("loss", "kl", "gap_error"):
            expected = model[figure] and pytest.approx(model[figure], rel=1e-6 if figure == "loss" else 1e-3)
            assert ours["models"][name][figure] == expected, (name, figure)
    for layer, expected in zip(ours["layers"], theirs["layers"], strict=True):
        assert layer.keys() == expected.keys()
        for name, value in expected.items():
            assert layer[name] == (None if value is None else pytest.approx(value, rel=1e-6)), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "memory"),
    [(2, "100GB"), (2, "0GB"), (4, "100GB")],  # 4: more than layers, and than batches of held-out text
)
def test_the_whole_chain_of_several_processes_is_that_of_one(chain, tmp_path, workers, memory):
    """In memory, and with the hidden states of each process on disk."""
    words, alone = chain
    done = torchrun(workers, tmp_path, [*words, f"model.hidden_memory={memory}"])
    assert done.returncode == 0, done.stderr
    for stage in CARVED:
        assert done.stdout.count(f"{stage:9} done in") == 1
    assert_same_carve(tmp_path, alone)
    assert not list((tmp_path / "artifacts" / "pico").glob("*/.*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "target", "calls"),
    [
        ("cluster", "stages.cluster.stage.group_layer", 1),
        ("assemble", "stages.assemble.stage.fit_layer", 1),
        ("project", "stages.project.layer_pass.project_layer", 2),
        ("project", "stages.project.carved_model:CarvedModel.backward", 3),
        ("evaluate", "stages.evaluate.comparison.align_down", 2),
    ],
)
def test_a_worker_that_dies_in_any_stage_ends_the_job_and_the_same_command_goes_on(
    chain, tmp_path, stage, target, calls
):
    words, alone = chain
    outputs = tmp_path / "outputs"
    later = CARVED[CARVED.index(stage) :]
    kept = [path for path in (alone / "artifacts" / "pico").iterdir() if path.name not in later]
    for path in kept:
        shutil.copytree(path, outputs / "artifacts" / "pico" / path.name)
    script = tmp_path / "dying.py"
    script.write_text(DYING_LATER)
    died = torchrun(2, outputs, words, program=(script, target, calls))
    assert died.returncode != 0
    assert GO_ON in died.stderr
    assert "worker 0: " in died.stderr
    assert not list((outputs / "artifacts" / "pico" / stage).glob("[!.]*"))
    done = torchrun(2, outputs, words)
    assert done.returncode == 0, done.stderr
    assert_same_carve(outputs, alone, later)


@pytest.mark.slow
def test_a_pool_is_that_of_one_process(chain, tmp_path):
    words, _ = chain
    other = {"experts", "always_on", "vocabulary.tokens", "evaluate.baselines"}
    pooled = [word for word in words if word.partition("=")[0] not in other]
    pooled += ["topology=global_pool", "experts=6", "always_on=0", "evaluate.baselines=[unaligned]"]
    done = torchrun(2, tmp_path / "two", pooled)
    assert done.returncode == 0, done.stderr
    assert torchrun(1, tmp_path / "one", pooled, limit=300).returncode == 0
    assert_same_carve(tmp_path / "two", tmp_path / "one")
