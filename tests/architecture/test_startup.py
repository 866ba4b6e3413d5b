"""The help page and errors about settings appear within three seconds, without importing torch."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SECONDS = 3

# Runs the command and checks afterwards that it has not loaded torch or transformers.
OBSERVED = """
import sys
from pipeline.__main__ import main
code = main()
assert "torch" not in sys.modules and "transformers" not in sys.modules
sys.exit(code)
"""


def run(*words, cwd=REPOSITORY):
    start = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", OBSERVED, *words]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done, time.monotonic() - start


def test_help_is_light_and_complete(tmp_path):
    done, seconds = run("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert seconds < SECONDS
    for word in ("always_on", "balanced_kmeans", "evaluate", "python -m pipeline stage=scan", "qwen2_5_0_5b"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["stage=scam"], ["stage=scam is none of all, scan"]),
        (["expert=3", "cluster=foo"], ["there is no setting expert", "cluster=foo is none of"]),
        (["n=2048", "data=text", "data.path=nowhere"], ["n=2048 needs at least 2048 neurons", "nowhere"]),
    ],
)
def test_errors_in_the_settings_are_light(tmp_path, words, messages):
    done, seconds = run(*words, f"output_dir={tmp_path}")
    assert done.returncode == 2
    assert done.stdout == ""
    assert all(message in done.stderr for message in messages), done.stderr
    assert seconds < SECONDS
    assert list(tmp_path.iterdir()) == []
