"""Staging and publishing: a result is published whole or not at all."""

import subprocess
from contextlib import suppress

import pytest

from instruments.errors import ContractError
from pipeline.artifacts import Manifest, StagingDir, is_complete, open_staging, publish, remove_leftovers, verify
from stages.artifacts.job import Table

TABLE = Table(title="neurons", columns=["layer", "loss"], rows=[[0, 1.5], [1, 2.5]], notes=["a note"])


def make(final, *, text="result", fresh=False):
    with open_staging(final, fresh=fresh) as staging:
        (staging.out / "inner").mkdir()
        (staging.out / "inner" / "a.txt").write_text(text)
        (staging.out / "b.txt").write_text("bb")
        return publish(staging, fingerprint="f00d", recipe={"stage": "scan"}, table=TABLE)


@pytest.fixture
def final(tmp_path):
    return tmp_path / "scan" / "f00d"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_published_folder_verifies_and_leaves_nothing_else(final):
    written = make(final)
    assert is_complete(final)
    assert Manifest.read(final, remedy="") == written
    assert written.files["b.txt"] == {
        "size": 2,
        "sha256": "3b64db95cb55c763391c707108489ae18b4112d783300de38e033b4c98c3deaf",
    }
    verify(final, remedy="")
    assert names(final.parent) == ["f00d"]


@pytest.mark.parametrize("name", ["model-extra.safetensors", "adapter_config.json", "inner/modeling.py"])
def test_files_that_were_added_are_refused_until_they_are_moved_away(final, name, monkeypatch, tmp_path):
    make(final)
    (final / name).write_text("x")
    with pytest.raises(ContractError) as caught:
        verify(final, remedy="again")
    assert str(caught.value).startswith("files were added to the result of scan after it was published")
    monkeypatch.chdir(tmp_path)
    subprocess.run(caught.value.do.partition(", or ")[0], shell=True, check=True)
    verify(final, remedy="again")


def test_a_link_to_a_folder_is_an_added_file_and_what_no_loader_takes_is_none(final, tmp_path):
    make(final)
    (final / ".DS_Store").write_text("x")
    (final / "model.gguf").write_text("x")
    verify(final, remedy="")
    (final / "additional_chat_templates").symlink_to(tmp_path)
    with pytest.raises(ContractError, match="files were added to the result of scan"):
        verify(final, remedy="")


def test_a_failed_stage_publishes_nothing_and_keeps_its_scratch(final):
    fail_halfway(final)
    assert not is_complete(final)
    assert names(final.parent) == [".f00d"]
    with open_staging(final, fresh=False) as staging:
        assert names(staging.out) == []
        assert (staging.scratch / "progress").read_text() == "17"


def fail_halfway(final):
    with suppress(ZeroDivisionError), open_staging(final, fresh=False) as staging:
        (staging.out / "half.txt").write_text("ha")
        (staging.scratch / "progress").write_text("17")
        raise ZeroDivisionError


def test_unfinished_work_goes_if_its_parents_hold_other_tensors_now(final):
    for tensors, left in (("a", []), ("a", ["progress"]), ("b", [])):
        with open_staging(final, fresh=False, read={"cluster": tensors}) as staging:
            assert names(staging.scratch) == left
            (staging.scratch / "progress").write_text("17")
    (staging.scratch / "progress").unlink()
    remove_leftovers(final.parent)
    assert names(final.parent) == []


def test_fresh_forgets_scratch_and_replaces_the_result(final):
    make(final, text="old")
    scratch = final.with_name(".f00d") / "scratch"
    scratch.mkdir(parents=True)
    (scratch / "progress").write_text("17")
    with open_staging(final, fresh=True) as staging:
        assert names(staging.scratch) == []
        assert (final / "inner" / "a.txt").read_text() == "old"
        (staging.out / "new.txt").write_text("new")
        publish(staging, fingerprint="f00d", recipe={}, table=TABLE)
    assert names(final) == ["manifest.json", "new.txt"]
    assert names(final.parent) == ["f00d"]


def test_what_killed_runs_left_is_removed_but_their_scratch_stays(final):
    dead = final.with_name(".dead")
    (dead / "out").mkdir(parents=True)
    (dead / "scratch").mkdir()
    (dead / "scratch" / "progress").write_text("17")
    (final.parent / ".dead.lock").write_text("1234")
    (final.parent / ".beef.lock").write_text("1234")
    remove_leftovers(final.parent)
    assert names(final.parent) == [".dead"]
    assert names(dead) == ["scratch"]


def test_an_old_result_is_put_back_when_its_replacement_was_killed(final):
    make(final, text="old")
    staging = StagingDir(final)
    staging.root.mkdir()
    final.rename(staging.replaced)
    remove_leftovers(final.parent)
    assert names(final.parent) == ["f00d"]
    assert (final / "inner" / "a.txt").read_text() == "old"


def test_the_unfinished_work_of_a_living_run_is_left_alone(final):
    with open_staging(final.with_name("beef"), fresh=False) as other:
        remove_leftovers(final.parent)
        assert other.out.is_dir()
