"""How a process of `python -m pipeline` ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.__main__ import main

REPOSITORY = Path(__file__).parents[3]
# Threads of other libraries may abort during Python's shutdown; this exit handler always aborts.
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


def run_under(words, stdout=subprocess.PIPE, **environment):
    command = [sys.executable, "-m", "pipeline", *words]
    return subprocess.run(
        command, env=os.environ | environment, cwd=REPOSITORY, stdout=stdout, stderr=subprocess.PIPE, check=False
    )


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}


@pytest.mark.parametrize("environment", [ASCII, {"PYTHONIOENCODING": "ascii"}])
def test_the_help_page_in_a_locale_without_unicode(environment):
    done = run_under(["--help"], **environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode("ascii").startswith("Carve a sparse Mixture-of-Experts")


def test_nobody_reads_the_help_page():
    """As behind `| head -1`."""
    read, write = os.pipe()
    os.close(read)
    done = run_under(["--help"], stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_names_do_not_steer_the_terminal(tmp_path):
    done = run_under(
        ["model=local", f"model.path={tmp_path}/\x1b[2Jname", "data=python_stdlib", f"output_dir={tmp_path}"]
    )
    assert done.returncode == 2
    assert b"\x1b" not in done.stderr
    assert rb"\x1b[2Jname" in done.stderr


def test_an_interrupt_while_modules_are_imported_ends_without_a_traceback(monkeypatch):
    def interrupt(_words):
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.__main__._do", interrupt)
    assert main() == 130
