"""The record of a run."""

import logging
import os
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

from instruments.errors import ConfigError, ContractError
from pipeline.run_folder import (
    RunFolder,
    RunRecord,
    StageRun,
    installed_versions,
    peak_bytes,
    read_all_records,
    read_run_record,
    render,
    replace_link,
    start_measuring,
)
from pipeline.settings import Settings
from stages.artifacts.job import Table

TABLE = Table("Neurons", ("layer", "loss", "tokens"), ((0, 1.23456789, 12345), (1, 2.0, 7)), ("a note", "another"))


@pytest.fixture
def run(tmp_path):
    settings = Settings(experts=3, n=4, output_dir=str(tmp_path))
    return RunFolder(tmp_path / "runs" / "now", settings, ["stage=scan", "experts=3"])


def test_the_settings_are_kept_resolved(run):
    kept = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert (kept["experts"], kept["n"], kept["model"]["kind"]) == (3, 4, "embedded")


def test_the_report_grows_stage_by_stage(run):
    run.append_stage("scan", "1.0 s", TABLE)
    assert run.report.read_text() == (
        "# embedded\n\n    python -m pipeline stage=scan experts=3\n"
        "\n## scan\n\n1.0 s\n\nNeurons\n\n"
        "| layer   |   loss |   tokens |\n|---------|--------|----------|\n"
        "| 0       |  1.235 |   12,345 |\n| 1       |      2 |        7 |\n"
        "\na note\nanother\n"
    )


def test_programs_read_what_was_done(run):
    run.record_stage("scan", "ab" * 32, 1.5, 7)
    run.record_stage("score", "cd" * 32)
    record = read_run_record(run.folder)
    assert record.overrides == ["stage=scan", "experts=3"]
    assert record.stages == [StageRun("scan", "ab" * 32, 1.5, 7), StageRun("score", "cd" * 32)]


def test_what_a_stage_has_formatted_stays():
    table = Table("T", ("model", "gap"), (("dense", "+0.0000"), ("MoE", "+0.0525")))
    assert render(table, "simple").splitlines()[-2:] == ["dense    +0.0000", "MoE      +0.0525"]


def test_a_table_without_notes_ends_with_its_last_row():
    assert render(Table("T", ("a",), ((1,),)), "simple") == "T\n\na\n---\n1"


def test_the_checkpoint_is_found_from_a_stable_place(run, tmp_path):
    for name in ("one", "two"):
        checkpoint = tmp_path / "artifacts" / name
        checkpoint.mkdir(parents=True)
        stable = run.link_latest(checkpoint)
        assert stable == tmp_path / "latest"
        assert (stable / "checkpoint").resolve() == checkpoint
    assert not (run.folder / "checkpoint").readlink().is_absolute()


def test_latest_is_also_a_run_without_a_checkpoint(run, tmp_path):
    (tmp_path / "older").mkdir()
    replace_link(run.latest, tmp_path / "older")
    assert run.link_latest(None).resolve() == run.folder
    assert not (run.latest / "checkpoint").is_symlink()


def test_links_in_a_folder_that_is_reached_through_a_link(tmp_path):
    for folder in ("disk/deep/home", "outputs/artifact"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "home").symlink_to("disk/deep/home")
    (tmp_path / "out").symlink_to("outputs")
    replace_link(tmp_path / "home" / "link", tmp_path / "out" / "artifact")
    assert (tmp_path / "home" / "link").resolve() == tmp_path / "outputs" / "artifact"


def test_a_link_that_a_killed_process_of_the_same_number_left(tmp_path):
    (tmp_path / f".latest.{os.getpid()}").symlink_to("nowhere")
    (tmp_path / "run").mkdir()
    replace_link(tmp_path / "latest", tmp_path / "run")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["latest", "run"]
    assert (tmp_path / "latest").readlink() == Path("run")


def test_links_survive_moving_the_outputs(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "target").mkdir()
    replace_link(tmp_path / "a" / "link", tmp_path / "a" / "target")
    (tmp_path / "a").rename(tmp_path / "b")
    assert (tmp_path / "b" / "link").resolve() == tmp_path / "b" / "target"


def test_the_log_goes_to_console_and_file_with_warnings_and_errors(run, capsys):
    def fail():
        with run.logging():
            logging.getLogger("stages.scan").info("reading")
            logging.getLogger("elsewhere").info("noise")
            warnings.warn("careful", stacklevel=1)
            raise ZeroDivisionError("by zero")

    with warnings.catch_warnings(action="default"), pytest.raises(ZeroDivisionError):
        fail()
    said, kept = capsys.readouterr().out, (run.folder / "run.log").read_text()
    assert said.startswith("reading\n")
    assert "careful" in said
    assert "INFO stages.scan: reading" in kept
    assert "careful" in kept
    assert "ZeroDivisionError: by zero" in kept
    assert "noise" not in said + kept


def test_nobody_reads_the_console(run, capfd, monkeypatch):
    """As behind `| head -1`: the run continues, its log is complete, and stderr is empty."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", buffering=1) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with run.logging():
            for number in range(3):
                logging.getLogger("pipeline").info("line %d \x1b[2J", number)
    log = (run.folder / "run.log").read_text()
    assert ["line 0" in log, "line 2" in log, "\x1b" in log, r"\x1b[2J" in log] == [True, True, False, True]
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("fails", [False, True])
def test_a_full_disk_ends_the_log_and_not_the_run(run, capsys, fails):
    (run.folder / "run.log").symlink_to("/dev/full")

    def work():
        with run.logging():
            for number in range(3):
                logging.getLogger("pipeline").info("line %d", number)
            if fails:
                raise ConfigError("no room left")

    with pytest.raises(ConfigError, match="no room left") if fails else nullcontext():
        work()
    said = capsys.readouterr()
    assert said.out == "line 0\nline 1\nline 2\n"
    assert said.err == (f"{run.folder / 'run.log'} lacks lines from here on: [Errno 28] No space left on device\n")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can reset the peak")
def test_the_peak_is_that_since_the_last_reset():
    size = 64 * 2**20
    start_measuring()
    before = peak_bytes()
    block = bytearray(size)
    block[::4096] = b"x" * len(block[::4096])
    assert peak_bytes() > before + 0.9 * size
    del block
    start_measuring()
    assert peak_bytes() < before + 0.5 * size


def test_what_is_written_is_read(tmp_path):
    record = RunRecord.start(["stage=scan"])
    record.stages += [StageRun("scan", "ab" * 32, 1.5, 7), StageRun("score", "cd" * 32)]
    record.write(tmp_path)
    assert read_run_record(tmp_path) == record
    assert [path.name for path in tmp_path.iterdir()] == ["stages.json"]


@pytest.mark.parametrize("content", [None, "no JSON", "[]", '{"stages": [{"stge": 1}]}'])
def test_a_folder_of_no_run_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "stages.json").write_text(content)
    with pytest.raises(ContractError) as error:
        read_run_record(tmp_path)
    assert error.value.what.startswith("no record of a run: ")
    assert error.value.where == str(tmp_path)
    assert error.value.do == "name a folder under outputs/runs, or latest"


def test_records_are_read_from_the_newest_to_the_oldest(tmp_path):
    """Jobs of a sweep by the time of the sweep and their number."""
    newest_first = ["runs/2026-03-04", "sweeps/2026-03-02/10", "sweeps/2026-03-02/9", "runs/2026-03-01"]
    for name in sorted(newest_first):
        (tmp_path / name).mkdir(parents=True)
        RunRecord.start([name]).write(tmp_path / name)
    (tmp_path / "sweeps/2026-03-02/notes").mkdir()
    assert [record.overrides for record in read_all_records(tmp_path)] == [[name] for name in newest_first]


def test_versions_are_those_installed():
    versions = installed_versions()
    assert versions["python"].startswith("3.")
    assert {"torch", "transformers", "numpy"} < set(versions)
