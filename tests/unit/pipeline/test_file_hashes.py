"""Hashes of large files are remembered until the file changes."""

import os

import pytest

from instruments.files import hash_file
from pipeline.artifacts import REMEMBERED_BYTES, FileHashes


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


def test_a_memory_that_is_no_file_is_not_waited_for(file, tmp_path):
    (tmp_path / "artifacts").mkdir()
    os.mkfifo(tmp_path / "artifacts/hashes.json")
    assert FileHashes(tmp_path)(file) == hash_file(file)


def test_an_answer_is_found_once_by_any_process(file, tmp_path):
    found = []
    for question in ("a", "b", "a"):
        memory = FileHashes(tmp_path)
        memory(file)
        assert memory.recall(question, lambda question=question: found.append(question) or question * 2) == question * 2
    assert found == ["a", "b"]
    file.unlink()
    assert FileHashes(tmp_path).recall("a", list) == "aa"
