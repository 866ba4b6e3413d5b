"""Nothing is computed twice, nothing is lost, and a kill at any moment changes no result."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from integration.carving import published, words_of_pico
from integration.forked import kill_at
from pico import write_pico

from instruments.errors import FAILED
from pipeline.cli import run_command
from pipeline.settings import asked_stages
from stages.calibration import token_memory

WHOLE = [stage.name for stage in asked_stages("all")]
LAYERS = 2  # of the model below


@pytest.fixture(scope="session")
def words(tmp_path_factory, text):
    """The command line of a carve that takes seconds."""
    source = write_pico(tmp_path_factory.mktemp("source") / "pico", "llama", tokenizer=True)
    shape = ("experts=4", "n=8", "top_k=2", "always_on=8", "vocabulary.tokens=100")
    quick = ("store.checkpoint_every=0", "cluster.map=none", "evaluate.speed_tokens=0", "evaluate.samples=0")
    return [*words_of_pico(source, text), *shape, *quick]


@pytest.fixture(scope="session")
def finished(words, tmp_path_factory):
    """The outputs of an uninterrupted run of the whole chain. Read-only."""
    outputs = tmp_path_factory.mktemp("finished")
    assert run_command([*words, f"output_dir={outputs}"]) == 0
    return outputs


@pytest.fixture
def outputs(finished, tmp_path):
    """A copy of the finished outputs, by hard links."""
    subprocess.run(["cp", "-rl", finished / "artifacts", tmp_path / "artifacts"], check=True)
    return tmp_path


def forget(outputs, *stages):
    """Remove published results, as if these stages had never run."""
    for stage in stages:
        for folder in stage_folder(outputs, stage).iterdir():
            for path in sorted(folder.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            folder.rmdir()


def stage_folder(outputs, stage):
    return outputs / "artifacts" / "pico" / stage


def hashes(outputs, stage):
    """Name, size and hash of every published file of a stage."""
    return json.loads((published(outputs, stage) / "manifest.json").read_text())["files"]


def in_process(outputs, words, *more):
    return run_command([*words, *more, f"output_dir={outputs}"])


def run_killed(outputs, words, *more, at, calls=1):
    kill_at([*words, *more, f"output_dir={outputs}"], at, calls)


def hidden(outputs, stage):
    return [path.name for path in stage_folder(outputs, stage).iterdir() if path.name.startswith(".")]


def test_the_chain_leaves_a_checkpoint_and_a_report(finished):
    latest = finished / "latest"
    assert (latest / "checkpoint" / "config.json").is_file()
    assert (latest / "checkpoint").resolve() == published(finished, "project") / "checkpoint"
    assert [stage["stage"] for stage in json.loads((latest / "stages.json").read_text())["stages"]] == WHOLE
    assert "<h2>Quality</h2>" in (latest / "report.html").read_text()
    assert (latest / "config.yaml").is_file()
    assert "evaluate  done in" in (latest / "run.log").read_text()


def test_a_rerun_does_nothing_and_says_so(outputs, words, capsys, monkeypatch):
    monkeypatch.setattr("pipeline.settings.Stage.run", property(lambda stage: pytest.fail(f"{stage.name} ran")))
    assert in_process(outputs, words) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines() if "kept from an earlier run" in line] == WHOLE
    assert "dense model" in said
    assert f"checkpoint {published(outputs, 'project') / 'checkpoint'}" in said


def test_only_what_is_missing_or_asked_for_again_is_run(outputs, words, capsys):
    def stages_of(word):
        """Stages that were kept, and that ran."""
        said = capsys.readouterr().out.splitlines()
        return [line.split()[0] for line in said if line.split()[1:2] == [word]]

    before, folder = hashes(outputs, "scan"), published(outputs, "score").stat().st_ino
    assert in_process(outputs, words, "stage=cluster", "experts=2") == 0
    assert stages_of("kept") == ["scan", "score"]
    assert in_process(outputs, words, "stage=score", "fresh=true") == 0
    assert stages_of("running") == ["score"]
    assert published(outputs, "score").stat().st_ino != folder
    forget(outputs, "scan", "score")
    assert in_process(outputs, words, "stage=score") == 0
    assert stages_of("running") == ["scan", "score"]
    assert hashes(outputs, "scan") == before


def test_a_tampered_parent_is_named_and_the_remedy_works(outputs, words, capsys):
    forget(outputs, "score")
    damaged = published(outputs, "scan") / "statistics.safetensors"
    content = damaged.read_bytes()
    damaged.unlink()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert in_process(outputs, words, "stage=score") == 1
    error = capsys.readouterr().err
    assert f"  where: {damaged} was changed after it was published\n" in error
    assert error.endswith(f"output_dir={outputs} stage=scan fresh=true\n")
    assert in_process(outputs, words, "stage=scan", "fresh=true") == 0
    assert in_process(outputs, words, "stage=score") == 0


@pytest.mark.parametrize(("stage", "damaged"), [("project", "file"), ("project", "manifest"), ("evaluate", "file")])
def test_a_damaged_checkpoint_is_not_handed_over(outputs, words, capsys, stage, damaged):
    """Nor by an evaluation that is kept, which has read it; size and time of the file are as they were."""
    folder = published(outputs, "project")
    path = folder / ("manifest.json" if damaged == "manifest" else "checkpoint/model.safetensors")
    content, status = bytearray(path.read_bytes()), path.stat()
    content[-9] ^= 1
    path.unlink()  # a hard link: the finished run stays unchanged
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert in_process(outputs, words, f"stage={stage}") == 1
    said = capsys.readouterr()
    assert str(path) in said.err
    assert said.err.endswith(f"output_dir={outputs} stage=project fresh=true\n")
    assert "\ncheckpoint" not in said.out
    assert not (outputs / "latest").exists()


def test_what_decides_a_result_is_looked_at_and_its_time_is_not(words, capsys, tmp_path):
    source = Path(next(word for word in words if word.startswith("model.path="))[len("model.path=") :])
    changed = Path(shutil.copytree(source, tmp_path / "source"))
    words = [*words, f"model.path={changed}", "stage=scan"]
    assert in_process(tmp_path, words) == 0
    for name in ("tokenizer.json", "generation_config.json", "model.safetensors"):
        (changed / name).touch()
        capsys.readouterr()
        assert in_process(tmp_path, words) == 0
        assert "scan      kept from an earlier run" in capsys.readouterr().out
        content, status = (changed / name).read_bytes(), (changed / name).stat()
        end = b" " + content[-2:] if name.endswith("json") else b"abc"
        (changed / name).write_bytes(content[:-3] + end)
        os.utime(changed / name, ns=(status.st_atime_ns, status.st_mtime_ns))
        in_process(tmp_path, words)
        assert "kept from an earlier run" not in capsys.readouterr().out
        (changed / name).write_bytes(content)


def test_what_depends_on_a_lost_result_is_computed_again_if_its_tensors_differ_now(outputs, words, monkeypatch):
    module = import_module("stages.score.stage")
    original = module.score_neurons
    changed = lambda *args: replace(found := original(*args), chosen=-found.chosen)  # noqa: E731
    monkeypatch.setattr(module, "score_neurons", changed)
    forget(outputs, "score")
    before = hashes(outputs, "cluster")
    assert in_process(outputs, words, "stage=all") == 0
    (record,) = (outputs / "runs").glob("*/stages.json")
    computed = [stage["stage"] for stage in json.loads(record.read_text())["stages"] if stage["seconds"] is not None]
    assert computed == WHOLE[1:]
    assert hashes(outputs, "cluster") != before


def test_a_scan_killed_between_checkpoints_goes_on_to_the_same_statistics(outputs, words):
    before = hashes(outputs, "scan")
    forget(outputs, "scan")
    run_killed(outputs, words, "stage=scan", at="stages.accumulators.sums:LocalStore.flush", calls=4)
    assert len(hidden(outputs, "scan")) == 2  # the staging folder with its scratch, and a lock nobody holds
    assert in_process(outputs, words, "stage=scan") == 0
    assert hashes(outputs, "scan") == before
    assert hidden(outputs, "scan") == []


def count_calls(monkeypatch, module, name):
    """A list that grows with every call of a function."""
    calls, original = [], getattr(import_module(module), name)
    monkeypatch.setattr(f"{module}.{name}", lambda *given, **named: calls.append(1) or original(*given, **named))
    return calls


GRADIENTS = "stages.project.carved_model:CarvedModel.backward"


@pytest.mark.parametrize(
    ("stage", "place", "work", "at", "left"),
    [
        ("project", "layer_pass", "project_layer", "stages.project.layer_pass:save_layer_checkpoint", LAYERS - 1),
        ("project", "layer_pass", "project_layer", GRADIENTS, 0),
        pytest.param(
            *("assemble", "stage", "load_balance", "stages.assemble.stage:load_balance", LAYERS - 1),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_kill_costs_no_layer_that_is_done(outputs, words, stage, place, work, at, left, monkeypatch):
    before = hashes(outputs, stage)
    forget(outputs, stage)
    run_killed(outputs, words, f"stage={stage}", at=at, calls=2)
    done = count_calls(monkeypatch, f"stages.{stage}.{place}", work)
    assert in_process(outputs, words, f"stage={stage}") == 0
    assert len(done) == left
    assert hashes(outputs, stage) == before


def test_a_stage_that_reruns_since_its_parents_have_changed_resumes(outputs, words, monkeypatch):
    module = import_module("stages.score.stage")
    original = module.score_neurons
    with monkeypatch.context() as patch:
        changed = lambda *args: replace(found := original(*args), chosen=-found.chosen)  # noqa: E731
        patch.setattr(module, "score_neurons", changed)
        assert in_process(outputs, words, "stage=score", "fresh=true") == 0
    run_killed(outputs, words, "stage=project", at="stages.project.layer_pass:save_layer_checkpoint", calls=2)
    done = count_calls(monkeypatch, "stages.project.layer_pass", "project_layer")
    assert in_process(outputs, words, "stage=project") == 0
    assert len(done) == LAYERS - 1
    assert hidden(outputs, "project") == []


@pytest.mark.parametrize(
    ("moment", "calls"),
    [
        pytest.param("pipeline.artifacts:publish", 1, id="before publishing"),
        pytest.param("pipeline.artifacts:sync_tree", 1, id="before the rename"),
        pytest.param("pathlib:Path.rename", 2, id="between the renames of a fresh result"),
        pytest.param("pipeline.run:Runner.report_stage", 1, id="after publishing"),
    ],
)
def test_a_kill_while_publishing_leaves_all_or_nothing(outputs, words, moment, calls):
    before = hashes(outputs, "score")
    run_killed(outputs, words, "stage=score", "fresh=true", at=moment, calls=calls)
    assert in_process(outputs, words, "stage=score") == 0
    assert hashes(outputs, "score") == before
    assert hidden(outputs, "score") == []


def test_generated_text_is_not_generated_again(words, tmp_path, monkeypatch):
    command = [*words, "stage=scan", "data.labels=generated", "data.prompt_tokens=9", "data.max_new_tokens=5"]
    assert run_command([*command, "data.tokens=300", f"output_dir={tmp_path / 'whole'}"]) == 0
    command += ["data.tokens=300", f"output_dir={tmp_path / 'killed'}"]
    kill_at(command, "stages.scan.passes:scan_shares", 1)
    for name in ("load_prompts", "continue_prompts"):
        monkeypatch.setattr(f"stages.text.generated.{name}", lambda *_, name=name, **__: pytest.fail(f"{name} ran"))
    assert run_command(command) == 0
    assert hashes(tmp_path / "killed", "scan") == hashes(tmp_path / "whole", "scan")


def test_hidden_states_on_disk_change_no_result_and_a_kill_leaves_none_of_them(outputs, words, monkeypatch):
    passes = ("cluster", "assemble", "project")
    before, alike = [hashes(outputs, stage) for stage in passes], {}
    for amount in ("100GB", "0GB"):
        shutil.rmtree(stage_folder(outputs, "project"))
        more = ("stage=project", f"model.hidden_memory={amount}")
        run_killed(outputs, words, *more, at="stages.project.layer_pass:project_layer", calls=2)
        alike[amount] = sorted(path.name for path in stage_folder(outputs, "project").rglob("*"))
    assert alike["0GB"] == alike["100GB"]
    spilled, original = [], token_memory.spill
    monkeypatch.setattr(token_memory, "spill", lambda *given: spilled.append(1) or original(*given))
    for stage in (*passes, "evaluate"):
        shutil.rmtree(stage_folder(outputs, stage))
    assert in_process(outputs, words, "model.hidden_memory=0GB") == 0
    assert len(spilled) > 100
    assert [hashes(outputs, stage) for stage in passes] == before


def change_after(stage, file, monkeypatch):
    """Add a space to a file once this stage has computed its result."""
    module = import_module(f"stages.{stage}.stage")
    original = module.run

    def run(*args, **inputs):
        table = original(*args, **inputs)
        file.write_bytes(file.read_bytes() + b" ")
        return table

    monkeypatch.setattr(module, "run", run)


def test_a_model_that_changes_during_a_run_ends_it(words, tmp_path, monkeypatch, capsys):
    (path,) = (word.partition("=")[2] for word in words if word.startswith("model.path="))
    shutil.copytree(path, tmp_path / "pico")
    change_after("score", tmp_path / "pico/config.json", monkeypatch)
    assert in_process(tmp_path, words, f"model.path={tmp_path / 'pico'}", "stage=extract") == FAILED
    error = capsys.readouterr().err
    assert "the files of the dense model were changed during this run" in error
    assert f"where: stage=cluster, {tmp_path}/pico: config.json\n" in error
    assert list((tmp_path / "artifacts/pico/cluster").iterdir()) == []


@pytest.mark.parametrize(("stage", "code"), [("scan", 0), ("cluster", FAILED)])
def test_a_text_that_changes_during_a_run_is_named(words, tmp_path, monkeypatch, capsys, stage, code):
    (path,) = (word.partition("=")[2] for word in words if word.startswith("data.path="))
    shutil.copy(path, tmp_path / "text.txt")
    change_after("scan", tmp_path / "text.txt", monkeypatch)
    command = [*words, f"data.path={tmp_path / 'text.txt'}", "cluster=contiguous", f"stage={stage}"]
    assert in_process(tmp_path, command) == code
    said = capsys.readouterr()
    assert "stage=scan may have read other text than planned" in said.out
    assert ("stage=cluster" in said.err) == bool(code)
    assert not list((tmp_path / "artifacts/pico").glob("cluster/[!.]*"))


def test_an_interrupt_says_what_is_kept(outputs, words):
    forget(outputs, "score", "cluster")
    # A test run in the background of a shell ignores SIGINT, and children inherit that.
    listen = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{listen}; from pipeline.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *words, "stage=cluster", f"output_dir={outputs}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], text=True, **pipes) as process:
        while "score     running" not in (line := process.stdout.readline()):
            assert line, process.communicate()
        process.send_signal(signal.SIGINT)
        said, error = process.communicate(timeout=120)
    assert process.returncode == 130, error
    assert "the same command goes on from there" in said
    assert "kept: scan" in said


def test_a_full_disk_is_told_and_leaves_nothing(outputs, words, capsys):
    """A limit on the size of files acts like a full disk, without root."""
    forget(outputs, "extract")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 * 1024, hard))
    try:
        assert in_process(outputs, words, "stage=extract") == FAILED
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    what, where, do = capsys.readouterr().err.splitlines()[-3:]
    assert what.startswith("no room left on the disk: about ")
    assert where.startswith("  where: stage=extract, ")
    assert do == "  do:    free some space, or output_dir= on another disk, then the same command again"
    assert list(stage_folder(outputs, "extract").iterdir()) == []
