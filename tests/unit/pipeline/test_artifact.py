"""Damage to published results is detected and named."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from contextlib import suppress

import pytest
from filelock import SoftFileLock

from instruments.errors import ContractError
from instruments.files import hash_file
from pipeline.artifacts import (
    REMEMBERED_BYTES,
    FileHashes,
    LockedError,
    Manifest,
    StagingDir,
    describe_files,
    hold_lock,
    is_complete,
    open_staging,
    output_in_use,
    publish,
    remove_leftovers,
    verify,
)
from stages.artifacts.job import Table

REMEDY = "python -m pipeline stage=scan fresh=true"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "scan" / "f00d"
    folder.mkdir(parents=True)
    for name in ("a", "b", "c"):
        (folder / name).write_text(name * 3)
    Manifest("f00d", {}, describe_files(folder), Table("", (), ())).write(folder)
    return folder


def test_every_damaged_file_is_named(folder):
    (folder / "a").unlink()
    (folder / "b").write_text("bbbb")
    (folder / "c").write_text("ccd")
    with pytest.raises(ContractError, match="the result of scan is damaged") as caught:
        verify(folder, remedy=REMEDY)
    assert all(str(folder / name) in caught.value.where for name in "abc")
    assert caught.value.do == REMEDY


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"table": {"titel": ""}}'])
def test_a_damaged_manifest_is_a_contract_error(folder, text):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(ContractError, match="no readable manifest") as caught:
        verify(folder, remedy=REMEDY)
    assert caught.value.where == str(folder / "manifest.json")
    assert caught.value.do == REMEDY


def test_no_changed_byte_of_a_manifest_goes_unnoticed(folder):
    """Except changes after which the JSON value is the same."""
    whole = (folder / "manifest.json").read_bytes()
    for position, byte in enumerate(whole):
        changed = bytearray(whole)
        changed[position] = byte ^ 1
        (folder / "manifest.json").write_bytes(changed)
        try:
            same = json.loads(changed) == json.loads(whole)
        except ValueError:
            same = False
        if not same:
            with pytest.raises(ContractError):
                verify(folder, remedy=REMEDY)


def test_a_name_outside_the_folder_is_refused(folder):
    for name in ("/etc/passwd", "../a", "inner/../../a"):
        Manifest("f00d", {}, {name: {"size": 1, "sha256": ""}}, Table("", (), ())).write(folder)
        with pytest.raises(ContractError, match="names files outside its folder"):
            verify(folder, remedy=REMEDY)


def test_the_result_of_another_fingerprint_is_refused(folder):
    Manifest("beef", {}, {}, Table("", (), ())).write(folder)
    with pytest.raises(ContractError, match="the result of scan is damaged") as caught:
        verify(folder, remedy=REMEDY)
    assert caught.value.where == f"{folder} holds the result beef"


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
    with suppress(ZeroDivisionError), open_staging(final, fresh=False) as staging:
        (staging.out / "half.txt").write_text("ha")
        (staging.scratch / "progress").write_text("17")
        raise ZeroDivisionError
    assert not is_complete(final)
    assert names(final.parent) == [".f00d"]
    with open_staging(final, fresh=False) as staging:
        assert names(staging.out) == []
        assert (staging.scratch / "progress").read_text() == "17"


def test_unfinished_work_goes_if_its_parents_hold_other_tensors_now(final):
    for tensors, left in (("a", []), ("a", ["progress"]), ("b", [])):
        with open_staging(final, fresh=False, read={"cluster": tensors}) as staging:
            assert names(staging.scratch) == left
            (staging.scratch / "progress").write_text("17")
    (staging.scratch / "progress").unlink()
    remove_leftovers(final)
    assert names(final.parent) == []


def unfinished(final, tensors):
    """Begin a run that is not finished on parents with these tensors; returns the progress that it found."""
    with open_staging(final, fresh=False, read={"cluster": tensors}) as staging:
        found = names(staging.scratch)
        (staging.out / "half.txt").write_text("ha")
        (staging.scratch / tensors).write_text("17")
    return found


def publish_read(final, tensors):
    with open_staging(final, fresh=False, read={"cluster": tensors}) as staging:
        publish(staging, fingerprint="f00d", recipe={"read": {"cluster": tensors}}, table=TABLE)


def test_a_run_that_replaces_a_result_of_other_tensors_resumes_as_any_other(final):
    publish_read(final, "old")
    assert [unfinished(final, "new"), unfinished(final, "new")] == [[], ["new"]]
    remove_leftovers(final.with_name("beef"))  # another result of the stage is kept
    staging = StagingDir(final)
    final.rename(staging.replaced)  # killed between the renames of `publish`
    assert unfinished(final, "new") == ["new"]
    assert Manifest.read(final, remedy="").recipe["read"] == {"cluster": "old"}
    publish_read(final, "new")
    assert names(final.parent) == ["f00d"]


def test_unfinished_work_goes_once_its_result_is_published_or_the_old_one_is_kept(final, monkeypatch):
    publish_read(final, "old")
    unfinished(final, "new")
    remove_leftovers(final)  # its parents hold the old tensors again
    assert names(final.parent) == ["f00d"]
    unfinished(final, "new")
    monkeypatch.setattr("pipeline.artifacts.sync", lambda _: 1 / 0)  # killed after the renames of `publish`
    with pytest.raises(ZeroDivisionError):
        publish_read(final, "new")
    assert names(final.parent) == ["f00d"]
    assert Manifest.read(final, remedy="").recipe["read"] == {"cluster": "new"}


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
    remove_leftovers(final)
    assert names(final.parent) == [".dead"]
    assert names(dead) == ["scratch"]


def test_an_old_result_is_put_back_when_its_replacement_was_killed(final):
    make(final, text="old")
    staging = StagingDir(final)
    staging.root.mkdir()
    final.rename(staging.replaced)
    remove_leftovers(final)
    assert names(final.parent) == ["f00d"]
    assert (final / "inner" / "a.txt").read_text() == "old"


def test_the_unfinished_work_of_a_living_run_is_left_alone(final):
    with open_staging(final.with_name("beef"), fresh=False) as other:
        remove_leftovers(final)
        assert other.out.is_dir()


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
        assert holder.wait(10) == -signal.SIGKILL
        assert (tmp_path / "l").read_text() == str(os.getpid())
    assert f"waiting for process {holder.pid}, which is computing the same result" in caplog.text


def test_a_killed_holder_leaves_no_lock(tmp_path, holder):
    holder.kill()
    holder.wait(10)
    assert (tmp_path / "l").exists()
    with hold_lock(tmp_path / "l"):
        assert (tmp_path / "l").read_text() == str(os.getpid())
    assert not (tmp_path / "l").exists()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_where_there_are_no_locks_a_run_goes_on_with_a_warning(final, monkeypatch, caplog, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    for module in ("fcntl", "pipeline.artifacts"):
        monkeypatch.setattr(f"{module}.flock", refuse)
    with output_in_use(final), warnings.catch_warnings(action="ignore"):  # filelock's own
        make(final)
        with open_staging(final, fresh=False) as staging:
            assert staging.lock.read_text().startswith(str(os.getpid()))
            # The file of filelock's own lock is whole: after two seconds, it takes over a lock that it cannot read.
            assert number == errno.ENOLCK or SoftFileLock(staging.lock).is_lock_held_by_us
    assert os.strerror(number) in caplog.text
    assert names(final.parent) == ["f00d"]
    with pytest.raises(LockedError, match="a run may be active"):  # for `runs remove`
        output_in_use(final, alone=True).__enter__()


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.artifacts.SETTLED", -1)
    path = tmp_path / "weights"
    path.write_bytes(b"\0" * REMEMBERED_BYTES)
    return path


@pytest.fixture
def read(monkeypatch):
    """Names of the files that were hashed."""
    found = []
    monkeypatch.setattr("pipeline.artifacts.hash_file", lambda path: found.append(path.name) or hash_file(path))
    return found


def test_a_large_file_is_read_once_by_any_process(file, read, tmp_path):
    for _process in range(2):
        assert FileHashes(tmp_path / "memory")(file) == hash_file(file)
    assert read == ["weights"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["memory", "weights"]


def test_the_memory_of_many_files_is_not_written_for_each(file, tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr("pipeline.artifacts.write_json", lambda _path, known: written.append(len(known)))
    memory = FileHashes(tmp_path)
    for number in range(400):
        memory.recall(str(number), str)
    assert len(written) < 20
    memory.save()
    memory.save()
    assert written[-1] == 400


def test_other_bytes_of_the_same_size_and_time_are_read_again(file, tmp_path):
    hash_of = FileHashes(tmp_path)
    before, status = hash_of(file), file.stat()
    with file.open("r+b") as open_file:
        open_file.write(b"\1")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert hash_of(file) == hash_file(file) != before


def test_what_changed_just_now_is_not_remembered(file, read, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.artifacts.SETTLED", 10**12)
    hash_of = FileHashes(tmp_path)
    assert hash_of(file) == hash_of(file)
    assert read == ["weights", "weights"]


@pytest.mark.parametrize("memory", ["", "[1]", "{", '{"a": 3}', "[[]]", "[" * 100_000])
def test_a_damaged_memory_only_costs_time(file, tmp_path, memory):
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts/hashes.json").write_text(memory)
    assert FileHashes(tmp_path)(file) == hash_file(file)


def test_an_answer_is_found_once_by_any_process(file, tmp_path):
    found = []
    for question in ("a", "b", "a"):
        memory = FileHashes(tmp_path)
        memory(file)
        assert memory.recall(question, lambda question=question: found.append(question) or question * 2) == question * 2
        memory.save()
    assert found == ["a", "b"]
    file.unlink()
    assert FileHashes(tmp_path).recall("a", list) == "aa"
