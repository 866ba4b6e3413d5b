"""The folder of a run: settings, record and links."""

import json
import logging
import os
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

from instruments.errors import ConfigError
from pipeline.run_folder import RunFolder, logging_to, replace_link
from pipeline.settings import Settings


@pytest.fixture
def run(tmp_path):
    settings = Settings(experts=3, n=4, output_dir=str(tmp_path))
    return RunFolder(tmp_path / "runs" / "now", settings, ["stage=scan", "experts=3"])


def test_settings_and_record_are_written_and_read(run):
    run.record_stage("scan", "ab" * 32, 1.5, 7)
    run.record_stage("score", "cd" * 32)
    record = json.loads((run.folder / "stages.json").read_text())
    assert record["overrides"] == ["stage=scan", "experts=3"]
    assert [[*stage.values()] for stage in record["stages"]] == [
        ["scan", "ab" * 32, 1.5, 7], ["score", "cd" * 32, None, None]
    ]  # fmt: skip
    kept = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert (kept["experts"], kept["n"], kept["model"]["kind"]) == (3, 4, "embedded")
    assert {path.name for path in run.folder.iterdir()} == {"config.yaml", "stages.json"}


def test_the_checkpoint_is_found_from_a_stable_place(run, tmp_path):
    for name in ("one", "two"):
        checkpoint = tmp_path / "artifacts" / name
        checkpoint.mkdir(parents=True)
        stable = run.link_latest(checkpoint)
        assert stable == tmp_path / "latest"
        assert (stable / "checkpoint").resolve() == checkpoint
    assert not (run.folder / "checkpoint").readlink().is_absolute()


@pytest.mark.parametrize("place", [".", "artifacts/x", "latest"])
def test_a_run_hides_in_no_folder_of_the_outputs(tmp_path, place):
    with pytest.raises(ConfigError, match="would not be found"):
        RunFolder(tmp_path / place, Settings(output_dir=str(tmp_path)), [])


def test_a_later_run_in_the_same_folder_begins_without_links(run, tmp_path):
    run.link_latest(tmp_path)
    (run.folder / "report.html").touch()
    again = RunFolder(run.folder, Settings(output_dir=str(tmp_path)), [])
    assert {path.name for path in again.folder.iterdir()} == {"config.yaml", "stages.json"}


def test_a_link_that_a_killed_process_of_the_same_number_left(tmp_path):
    (tmp_path / f".latest.{os.getpid()}").symlink_to("nowhere")
    replace_link(tmp_path / "latest", tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
    assert (tmp_path / "latest").readlink() == Path("run")


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
