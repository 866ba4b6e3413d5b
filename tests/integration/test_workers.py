"""Several processes scan together: the same sums as one, and nothing lost when one of them dies."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pico import write_pico
from safetensors.torch import load_file

from pipeline.cli import run_command

REPOSITORY = Path(__file__).parents[2]

# The command, but worker 1 kills itself, as the kernel would, before its n-th batch, once worker 0 has flushed, too.
DYING = """
import os, signal, sys, time
from pathlib import Path
from unittest.mock import patch
from stages.scan.passes import Scanner

calls, *words = sys.argv[1:]
original, left = Scanner.scan, [int(calls)]
outputs = Path(words[-1].removeprefix("output_dir="))

def counted(*args, **kwargs):
    left[0] -= 1
    if not left[0] and os.environ["RANK"] == "1":
        while not [*outputs.glob("artifacts/pico/scan/.*/scratch/sums.0.safetensors")]:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)

from pipeline.cli import run_command
with patch.object(Scanner, "scan", counted):
    sys.exit(run_command(words))
"""


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A scan of 7 batches, the last a small one."""
    folder = tmp_path_factory.mktemp("source")
    write_pico(folder / "pico", "qwen3", tokenizer=True)
    lines = (f"{number} wrens met {number * 7 % 31} robins near house {number % 9}." for number in range(300))
    (folder / "text.txt").write_text("\n\n".join(lines))
    (folder / "heldout.txt").write_text("No bird was met.")
    return [
        *("stage=scan", "model=local", f"model.path={folder / 'pico'}", "model.label=pico"),
        *("data=text", f"data.path={folder / 'text.txt'}", "data.tokens=630", "data.heldout_tokens=100"),
        f"data.heldout_path={folder / 'heldout.txt'}",
        *("data.max_length=50", "scan.batch_tokens=100", "scan.reservoir_tokens=40", "store.checkpoint_every=0"),
    ]


def torchrun(count, outputs, words, program=("-m", "pipeline")):
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}", "--standalone", *program]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [*map(str, start), *words, f"output_dir={outputs}"]
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def statistics(outputs):
    (path,) = (outputs / "artifacts" / "pico" / "scan").glob("[!.]*/statistics.safetensors")
    return load_file(path)


def assert_equal(found, expected):
    """To the last bit where the order of summation allows, which is everywhere but in float64 sums."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if tensor.dtype == torch.float64 and name != "max_abs":
            torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=0)
        else:
            assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def alone(words, tmp_path_factory):
    """What one process finds, on one thread as torchrun's workers do: more of them multiply in another order."""
    outputs, threads = tmp_path_factory.mktemp("alone"), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert run_command([*words, f"output_dir={outputs}"]) == 0
    finally:
        torch.set_num_threads(threads)
    return statistics(outputs)


def test_two_processes_equal_one(words, alone, tmp_path):
    done = torchrun(2, tmp_path, words)
    assert done.returncode == 0, done.stderr
    assert "630 tokens in 13 samples" in done.stdout
    assert done.stdout.count("scan      done in") == 1  # only one of them speaks
    assert_equal(statistics(tmp_path), alone)
    assert not list((tmp_path / "artifacts" / "pico" / "scan").glob(".*"))


@pytest.fixture(scope="module")
def lost(words, tmp_path_factory):
    """What a job leaves behind that lost a worker."""
    outputs = tmp_path_factory.mktemp("lost")
    script = tmp_path_factory.mktemp("script") / "dying.py"
    script.write_text(DYING)
    died = torchrun(2, outputs, words, program=(script, "3"))
    assert died.returncode != 0
    assert "the same command again: it goes on from what was flushed" in died.stderr
    scratch = next((outputs / "artifacts" / "pico" / "scan").glob(".*/scratch"))
    assert {path.name for path in scratch.glob("*.safetensors")} == {"sums.0.safetensors", "sums.1.safetensors"}
    return outputs


@pytest.mark.parametrize("later", [1, 3])
def test_a_lost_worker_stops_the_job_and_another_team_finishes_it(words, alone, lost, tmp_path, later):
    shutil.copytree(lost, tmp_path, dirs_exist_ok=True)
    done = torchrun(later, tmp_path, words)
    assert done.returncode == 0, done.stderr
    assert "went on from an earlier run at token" in done.stdout
    assert_equal(statistics(tmp_path), alone)


def test_wrong_settings_are_said_once(words, tmp_path):
    done = torchrun(2, tmp_path, [*words, "scan.batch_tokens=0"])
    assert done.returncode != 0
    assert done.stderr.count("scan.batch_tokens=0 must be at least 1") == 1
