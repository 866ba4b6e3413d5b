"""Files that are complete or not there."""

import errno
import os
import stat

import pytest
import torch
from safetensors.torch import save_file

from instruments.files import sync_tree, whole_file, write_text


@pytest.mark.parametrize(("mode", "wanted"), [(0o755, 0o644), (0o750, 0o640), (0o700, 0o600)])
def test_whoever_may_read_a_folder_may_read_the_checkpoint_in_it(tmp_path, mode, wanted):
    (folder := tmp_path / "out" / "checkpoint").mkdir(parents=True)
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    (tmp_path / "out").chmod(mode)
    sync_tree(tmp_path / "out")
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == wanted


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.ENOTSUP])
def test_a_file_system_that_flushes_no_folders_holds_files_too(tmp_path, monkeypatch, code):
    flush = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) or (tmp_path / "lost").exists():
            raise OSError(code, os.strerror(code))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_text(tmp_path / "kept", "1")
    assert (tmp_path / "kept").read_text() == "1"
    (tmp_path / "lost").touch()
    with pytest.raises(OSError, match=os.strerror(code)):
        write_text(tmp_path / "kept", "2")


def test_a_neighbour_of_the_same_stem_is_left_alone(tmp_path):
    """A user's o.partial stays; two files of one stem that are written at once do not share a temporary file."""
    (tmp_path / "o.partial").write_text("mine")
    with whole_file(tmp_path / "o.json") as one, whole_file(tmp_path / "o.parquet") as other:
        one.write_text("1")
        other.write_text("2")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "o.partial": "mine",
        "o.json": "1",
        "o.parquet": "2",
    }


def test_an_error_leaves_the_old_file(tmp_path):
    path = tmp_path / "o.json"
    path.write_text("old")
    with pytest.raises(FileNotFoundError), whole_file(path) as unfinished:
        unfinished.write_text((tmp_path / "absent").read_text())
    assert [file.name for file in tmp_path.iterdir()] == ["o.json"]
    assert path.read_text() == "old"
