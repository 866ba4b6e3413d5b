"""How a process of `python -m pipeline` ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
# Threads of other libraries that abort while Python shuts down, stood in for by one that surely does.
ABORTING = "import atexit, os, sys; atexit.register(os.abort); from pipeline.__main__ import leave; "


def leave(code, **environment):
    command = [sys.executable, "-c", f"{ABORTING}print('the last line'); leave({code})"]
    alone = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE", "MASTER_ADDR"}}
    return subprocess.run(command, env=alone | environment, cwd=REPOSITORY, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("code", [0, 2])
def test_a_worker_that_is_done_does_not_wait_for_threads_that_may_abort(code):
    done = leave(code, RANK="1", WORLD_SIZE="2", MASTER_ADDR="localhost")
    assert (done.returncode, done.stdout) == (code, "the last line\n")


def test_a_process_alone_shuts_down_as_usual():
    assert leave(0).returncode == -6
