"""The log of a run."""

import logging
import os
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest

from instruments.errors import ConfigError
from pipeline.run_folder import logging_to


@pytest.fixture
def file(tmp_path):
    return tmp_path / "run.log"


def test_the_log_goes_to_console_and_file_with_warnings_and_errors(file, capsys):
    def fail():
        with logging_to(file):
            logging.getLogger("stages.scan").info("reading")
            logging.getLogger("elsewhere").info("noise")
            warnings.warn("careful", stacklevel=1)
            raise ZeroDivisionError("by zero")

    with warnings.catch_warnings(action="default"), pytest.raises(ZeroDivisionError):
        fail()
    said, kept = capsys.readouterr().out, (file).read_text()
    assert said.startswith("reading\n")
    assert "careful" in said
    assert "INFO stages.scan: reading" in kept
    assert "careful" in kept
    assert "ZeroDivisionError: by zero" in kept
    assert "noise" not in said + kept


def test_nobody_reads_the_console(file, capfd, monkeypatch):
    """As behind `| head -1`: the run continues, its log is complete, and stderr is empty."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", buffering=1) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with logging_to(file):
            for number in range(3):
                logging.getLogger("pipeline").info("line %d \x1b[2J", number)
    log = (file).read_text()
    assert ["line 0" in log, "line 2" in log, "\x1b" in log, r"\x1b[2J" in log] == [True, True, False, True]
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("fails", [False, True])
def test_a_full_disk_ends_the_log_and_not_the_run(file, capsys, fails):
    file.symlink_to("/dev/full")

    def work():
        with logging_to(file):
            for number in range(3):
                logging.getLogger("pipeline").info("line %d", number)
            if fails:
                raise ConfigError("no room left")

    with pytest.raises(ConfigError, match="no room left") if fails else nullcontext():
        work()
    said = capsys.readouterr()
    assert said.out == "line 0\nline 1\nline 2\n"
    assert said.err == f"{file} lacks lines from here on: [Errno 28] No space left on device\n"
