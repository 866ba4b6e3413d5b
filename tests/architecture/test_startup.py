"""The help page and errors about settings appear within three seconds; like a plan, they do not import torch."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from models.check import check_source
from models.config import DRIVERS, ModelConfig
from pipeline.help import PROGRAMS

REPOSITORY = Path(__file__).parents[2]
SECONDS = 3  # of processor time

# Runs the command and checks afterwards that it has not loaded torch or transformers.
OBSERVED = """
import sys
from pipeline.__main__ import main
code = main()
assert "torch" not in sys.modules and "transformers" not in sys.modules
sys.exit(code)
"""

# Makes the plan only, since a stage that is due loads torch.
PLANNED = """
import sys
from pipeline.plan import make_plan
from pipeline.settings import compose
from pipeline.check import validate
make_plan(validate(compose(sys.argv[1:])[0]))
assert "torch" not in sys.modules
"""


@pytest.fixture(autouse=True, scope="module")
def _known_model():
    """The first plan of a model describes it, which needs torch; later plans read that description."""
    assert not check_source(ModelConfig())


def run(*words, cwd=REPOSITORY):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", OBSERVED, *words]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_is_light_and_complete(tmp_path):
    done, seconds = run("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert seconds < SECONDS
    for word in ("always_on", "balanced_kmeans", "evaluate", "python -m pipeline stage=scan", "qwen2_5_0_5b"):
        assert word in done.stdout


# The help pages of other programs, which have not loaded torch.
OTHERS = """
import sys
from pipeline.__main__ import main
for program in sys.argv[1:]:
    sys.argv[1:] = [program, "--help"]
    try:
        main()
    except SystemExit as end:
        assert not end.code
    assert "torch" not in sys.modules, program
"""


def test_the_help_of_every_program_is_light():
    command = [sys.executable, "-c", OTHERS, *PROGRAMS]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert re.findall(r"^usage: python -m pipeline (\w+) ", done.stdout, re.MULTILINE) == [*PROGRAMS]


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["stage=scam", "expert=3", "cluster=foo"],
         ["stage=scam is none of all, scan", "there is no setting expert", "cluster=foo is none of"]),
        (["n=2048", "data=text", "data.path=nowhere"], ["n=2048 needs at least 2048 neurons", "nowhere"]),
    ],
)  # fmt: skip
def test_errors_in_the_settings_are_light(tmp_path, words, messages):
    done, seconds = run(*words, f"output_dir={tmp_path}")
    assert done.returncode == 2
    assert done.stdout == ""
    assert all(message in done.stderr for message in messages), done.stderr
    assert seconds < SECONDS
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(any(map(list, map(Path("/dev").glob, DRIVERS))), reason="model.device=auto asks torch for the GPU")
def test_a_plan_is_light(tmp_path):
    command = [sys.executable, "-c", PLANNED, "stage=scan", f"output_dir={tmp_path}"]
    subprocess.run(command, cwd=REPOSITORY, check=True)


def test_the_page_of_a_report_needs_no_torch():
    """It is also written after an error, which may have left torch half imported."""
    code = "import sys, pipeline.report; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
