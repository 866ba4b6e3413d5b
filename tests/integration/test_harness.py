"""lm-evaluation-harness evaluates an emitted checkpoint like any model, without a network."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from models.source import EMBEDDED
from pipeline.harness import TASK, TASKS, answer_choices

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="pip install -e '.[harness]'"),
    # The harness's own dependencies.
    pytest.mark.filterwarnings("default"),
]
REPOSITORY = Path(__file__).parents[2]
CARVE = ["data.tokens=16384", "data.heldout_tokens=4096", "evaluate.baselines=[static_mask]"]


@pytest.fixture(scope="module")
def carved(tmp_path_factory):
    """The embedded model, carved with little text."""
    out = tmp_path_factory.mktemp("harness")
    run([sys.executable, "-m", "pipeline", f"output_dir={out}", *CARVE], REPOSITORY)
    return out / "latest" / "checkpoint"


def run(command, folder):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_harness_own_command_runs_from_any_folder(carved, tmp_path):
    words = ["--model", "hf", "--model_args", f"pretrained={carved},dtype=float32", "--device", "cpu"]
    words += ["--include_path", str(TASKS), "--tasks", TASK, "--limit", "24", "--output_path", str(tmp_path / "found")]
    run([sys.executable, "-m", "lm_eval", *words], tmp_path)
    (found,) = (tmp_path / "found").rglob("results_*.json")
    record = json.loads(found.read_text())
    assert record["n-samples"][TASK] == {"original": 306, "effective": 24}
    assert record["results"][TASK].keys() >= {"acc,none", "acc_stderr,none", "acc_norm,none", "acc_norm_stderr,none"}


def test_dense_and_carved_are_above_chance_and_close_to_each_other(carved):
    table = run([sys.executable, "-m", "pipeline.harness", str(EMBEDDED), str(carved)], REPOSITORY)
    dense, moe = (line.split() for line in table.splitlines()[2:4])
    # Chance is 25 with an error of 2.5.
    assert float(dense[1]) == pytest.approx(39.5, abs=0.4)
    assert float(moe[1]) > 33
    assert abs(float(moe[-3])) < 8


def test_a_limit_is_kept():
    answers = answer_choices(EMBEDDED, device="cpu", dtype="float32", batch_size=5, limit=7)
    assert len(answers.right) == len(answers.kinds) == 7
