"""Runs are listed with their figures, and removed with the results that no other run uses."""

import json
import os
import shutil
from hashlib import sha256

import pytest
from integration.forked import kill_at

from instruments.errors import ConfigError, ContractError
from pipeline.artifacts import LockedError, Manifest, artifact_folder, hold_lock, open_staging, output_in_use, publish
from pipeline.run_folder import RECORD, RunFolder
from pipeline.runs import compare, find_runs, main, remove_runs
from pipeline.settings import Settings
from stages.artifacts.job import Table

EVALUATED = Table(
    "evaluate",
    ["model", "perplexity", "loss gap (nats)", "active parameters", "parameters", "tokens/s"],
    [
        ["dense model", "3.000", "+0.0000", "5.00 M", "5.00 M", "7"],
        ["this MoE", "4.000", "+0.2877", "3.00 M", "6.00 M", ""],
    ],
)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "outputs"


def publish_result(out, stage, name, parents=(), label="pico"):
    """A published result whose fingerprint depends on stage and name; returns its folder."""
    mark = sha256(f"{stage} {name}".encode()).hexdigest()
    folder = artifact_folder(out, label, stage, mark)
    if not folder.exists():
        recipe = {"stage": stage, "parents": {parent.parent.name: full_mark(parent) for parent in parents}, "read": {}}
        with open_staging(folder, fresh=False) as staging:
            (staging.out / "tensor.safetensors").write_text("x" * 1000)
            publish(
                staging, fingerprint=mark, recipe=recipe, table=EVALUATED if stage == "evaluate" else Table("", (), ())
            )
    return folder


def full_mark(folder):
    return Manifest.read(folder, remedy="").fingerprint


def record(out, name, results, words=("stage=all",), planned=()):
    run = RunFolder(out / name, Settings(output_dir=str(out)), [*words], [*results, *planned])
    for folder in results:
        run.record_stage(folder.parent.name, full_mark(folder))
    return run


@pytest.fixture
def three(out):
    """Two runs share a scan; `old` alone has a score, `new` alone an evaluation; returns the results by name."""
    scan = publish_result(out, "scan", "both")
    score = publish_result(out, "score", "old", [scan])
    other = publish_result(out, "score", "new", [scan])
    evaluated = publish_result(out, "evaluate", "new", [other])
    record(out, "runs/old", [scan, score], ["score=wanda"])
    record(out, "runs/new", [evaluated])  # its ancestors are in the manifests alone
    return {"scan": scan, "score": score, "other": other, "evaluate": evaluated}


def test_a_folder_that_does_not_exist_is_not_made(out):
    assert main(["--output-dir", str(out), "remove", "runs/old"]) == 2
    assert not out.exists()


def test_runs_are_listed_with_the_figures_of_their_evaluation(out, three, capsys):
    assert main(["--output-dir", str(out)]) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["runs/old", "score", *"––––", "score=wanda"] in said
    assert ["runs/new", "evaluate", "+0.2877", "4.000", "3.00", "M", "–", "stage=all"] in said


def test_a_run_is_removed_with_what_only_it_uses(out, three):
    said = remove_runs(out, ["runs/old"])
    assert not three["score"].exists()
    assert all(three[name].is_dir() for name in ("scan", "other", "evaluate"))
    assert [run.name for run in find_runs(out)] == ["runs/new"]
    assert "runs/old" in said
    remove_runs(out, ["runs/new/"])
    assert [path for path in (out / "artifacts").rglob("*") if path.is_file()] == [out / "artifacts" / ".in_use"]


def test_the_same_fingerprint_of_another_model_stays(out):
    ours, theirs = (publish_result(out, "scan", "x", label=label) for label in ("pico", "nano"))
    record(out, "runs/ours", [ours])
    record(out, "runs/theirs", [theirs])
    remove_runs(out, ["runs/ours"])
    assert (ours.exists(), theirs.exists()) == (False, True)


def test_all_jobs_of_a_sweep_and_unfinished_work_are_removed(out, three):
    planned = artifact_folder(out, "pico", "cluster", "ab" * 32)
    with open_staging(planned, fresh=False) as staging:
        (staging.scratch / "layer").write_text("kept for a resumption")
    for job in range(11):
        record(out, f"sweeps/then/{job}", [three["scan"]], [f"seed={job}", "n=8"], planned=[planned])
    table = compare(out, find_runs(out / "sweeps" / "then"))
    assert [(row[0], row[1], row[-1]) for row in table.rows] == [
        (str(job), "scan (unfinished)", f"seed={job}") for job in range(11)
    ]
    remove_runs(out, ["sweeps/then"])
    assert [run.name for run in find_runs(out)] == ["runs/new", "runs/old"]
    assert three["scan"].exists()
    assert list(planned.parent.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "runs", "sweeps", "run", "runs/..", "../victim", "/", "artifacts", "latest", "runs/old/../new"],
)
def test_a_name_that_is_no_run(out, three, name):
    (out / "latest").symlink_to("runs/old")
    with pytest.raises(ConfigError):
        remove_runs(out, ["runs/old", name])
    assert all(folder.is_dir() for folder in three.values())


def test_nothing_is_removed_while_a_run_is_active(out, three):
    with output_in_use(out), output_in_use(out), pytest.raises(LockedError):
        remove_runs(out, ["runs/old"])
    with hold_lock(three["score"].with_name(f".{three['score'].name}.lock")), pytest.raises(LockedError):
        remove_runs(out, ["runs/old"])  # of a version that does not announce its runs
    assert three["score"].exists()
    remove_runs(out, ["runs/old"])


def test_links_are_removed_and_not_what_they_point_to(out, three, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("dear")
    (out / "runs" / "old" / "notes").symlink_to(victim)
    moved = three["score"].rename(tmp_path / "moved")
    three["score"].symlink_to(moved)
    remove_runs(out, ["runs/old"])
    assert (victim / "file").exists()
    assert (moved / "manifest.json").exists()
    assert not three["score"].is_symlink()


def test_a_run_whose_folder_is_elsewhere_counts(out, three, tmp_path):
    record(out, tmp_path / "elsewhere", [three["score"]])
    remove_runs(out, ["runs/old"])
    assert three["score"].exists()
    (linked,) = (run.name for run in find_runs(out) if run.folder.is_symlink())
    remove_runs(out, [linked])
    assert not three["score"].exists()
    assert (tmp_path / "elsewhere" / RECORD).exists()


@pytest.mark.parametrize("moved", [False, True])
def test_a_run_in_folders_of_any_depth_counts(out, three, tmp_path, moved):
    record(out, "runs/paper/qwen/seed0/again", [three["score"]])
    if moved:  # to a larger disk
        (out / "runs").rename(tmp_path / "runs")
        (out / "runs").symlink_to(tmp_path / "runs")
    remove_runs(out, ["runs/old"])
    assert three["score"].exists()
    remove_runs(out, ["runs/paper/qwen/seed0/again"])
    assert not three["score"].exists()


def test_a_run_is_not_removed_with_others_below_it(out, three):
    for name in ("qwen", "qwen/long"):  # hydra.run.dir
        record(out, name, [three["score"]])
    with pytest.raises(ConfigError) as caught:
        remove_runs(out, ["qwen"])
    assert "qwen/long" in caught.value.what
    assert (out / "qwen/long" / RECORD).exists()
    remove_runs(out, ["qwen", "qwen/long"])
    assert not (out / "qwen").exists()


def test_a_folder_that_vanishes_meanwhile_is_no_error(out, three, monkeypatch):
    (out / "runs/gone").mkdir()
    listed = os.scandir

    def scandir(folder):
        found = [*listed(folder)]
        if folder == out / "runs":
            (out / "runs/gone").rmdir()
        return found

    monkeypatch.setattr("pipeline.runs.os.scandir", scandir)
    assert [run.name for run in find_runs(out)] == ["runs/new", "runs/old"]


def test_a_damaged_record_does_not_add_settings_to_the_others(out, three):
    shown = compare(out, find_runs(out)).rows
    (out / "runs/damaged").mkdir()
    (out / "runs/damaged" / RECORD).write_text("{")
    assert [row for row in compare(out, find_runs(out)).rows if row[1] != "damaged record"] == shown


def test_a_folder_of_results_that_is_a_link_out_is_refused(out, three, tmp_path):
    stage = three["score"].parent
    stage.rename(tmp_path / "score")
    stage.symlink_to(tmp_path / "score")
    with pytest.raises(ContractError):
        remove_runs(out, ["runs/old"])
    assert three["score"].exists()


def test_runs_behind_a_link_out_are_not_removed(out, three, tmp_path):
    shared = tmp_path / "shared"
    shutil.copytree(out / "runs/old", shared / "old")
    (out / "runs/shared").symlink_to(shared)
    with pytest.raises(ContractError) as caught:
        remove_runs(out, ["runs/shared/old"])
    assert caught.value.where == str(out / "runs/shared/old")
    assert (shared / "old" / RECORD).exists()


@pytest.mark.parametrize(
    "result", ["../../victim/scan/0123456789abcdef", "/etc/scan/0123456789abcdef", "pico/scan/..", 7]
)
def test_a_hostile_record_removes_nothing_and_hides_nothing(out, three, result):
    path = out / "runs" / "new" / RECORD
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"results": [result]}))
    with pytest.raises(ContractError):
        remove_runs(out, ["runs/old"])  # what `new` uses is unknown
    assert [row[1] for row in compare(out, find_runs(out)).rows] == ["damaged record", "score"]
    remove_runs(out, ["runs/new"])  # itself can go, without any result
    assert all(folder.is_dir() for folder in three.values())


def test_a_damaged_manifest_of_another_run_is_refused(out, three):
    (three["other"] / "manifest.json").write_text("{")
    with pytest.raises(ContractError):
        remove_runs(out, ["runs/old"])
    assert three["scan"].exists()
    remove_runs(out, ["runs/new", "runs/old"])
    assert not list((out / "artifacts").rglob("tensor.safetensors"))


def test_folders_of_killed_runs(out, three):
    (out / "runs" / "empty").mkdir()  # killed before its record was written, so it used nothing
    record(out, "runs/none", [], planned=[three["score"]])  # planned to keep it
    remove_runs(out, ["runs/old"])
    assert three["score"].exists()


def test_latest_does_not_point_to_nothing(out, three):
    (out / "latest").symlink_to("runs/old")
    remove_runs(out, ["runs/new"])
    assert (out / "latest").is_symlink()
    remove_runs(out, ["runs/old"])
    assert not (out / "latest").is_symlink()


@pytest.mark.parametrize("deletions", [0, 1, 2, 5, 8, 13])
def test_a_killed_removal_goes_on(out, three, deletions):
    both = ["runs/old", "runs/new"]
    kill_at(both, "pipeline.runs:_delete", deletions + 1, work=lambda names: remove_runs(out, names))
    for folder in three.values():  # whole, or no result any more
        assert not folder.exists() or (folder / "tensor.safetensors").exists()
    remove_runs(out, [run.name for run in find_runs(out)])
    assert not list((out / "artifacts").rglob("tensor.safetensors"))
    assert find_runs(out) == []
