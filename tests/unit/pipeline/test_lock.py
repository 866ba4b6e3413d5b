"""One writer at a time; the lock of a killed writer is free."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from pipeline.artifacts import LockedError, hold_lock

HOLDER = """
import sys, time
from pathlib import Path
from pipeline.artifacts import hold_lock
with hold_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path / "l"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_held_lock_names_its_holder(tmp_path, holder):
    with pytest.raises(LockedError, match=f"another run is computing the same result\n  where: process {holder.pid}, "):
        hold_lock(tmp_path / "l").__enter__()


def test_a_job_of_a_sweep_waits_for_the_holder(tmp_path, holder, caplog):
    caplog.set_level("INFO")
    ending = threading.Timer(1, holder.kill)
    ending.start()
    with hold_lock(tmp_path / "l", wait=True):
        assert holder.poll() is not None
        assert (tmp_path / "l").read_text() == str(os.getpid())
    assert f"waiting for process {holder.pid}, which computes the same result" in caplog.text


def test_a_killed_holder_leaves_no_lock(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "l").exists()
    with hold_lock(tmp_path / "l"):
        assert (tmp_path / "l").read_text() == str(os.getpid())
    assert not (tmp_path / "l").exists()
