"""A full or forbidding disk, in words."""

import errno
import subprocess
import sys

import pytest
from safetensors import SafetensorError

from models.shape import Shape
from pipeline.disk import expected_bytes, explain_os_error, free_bytes, nearest_existing

CONFIG = {"hidden_size": 6, "num_hidden_layers": 2, "vocab_size": 11, "dtype": "float32"}

# A limit on the size of files is the one full disk that needs no root.
FILL = """
import resource, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from pipeline.disk import explain_os_error
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
folder = Path(sys.argv[1])
for write in (Path.write_bytes, lambda path, data: save_file({"a": torch.frombuffer(data, dtype=torch.uint8)}, path)):
    try:
        write(folder / "a", bytearray(9999))
    except Exception as error:
        print(explain_os_error(error, where="stage=scan", folder=folder, expected=9999).what)
"""


def test_what_a_stage_will_write():
    shape = Shape(experts=3, n=4, top_k=2, always_on=5)
    units = 2 * 3 * 6 * (3 * 4 + 5)
    assert expected_bytes("extract", CONFIG, shape) == 4 * units
    assert expected_bytes("assemble", CONFIG, shape) == 4 * (units + 2 * 4 * 6 * 6 + 2 * 11 * 6)
    pool = Shape(experts=3, n=4, top_k=2, always_on=5, topology="global_pool")
    assert expected_bytes("extract", CONFIG, pool) == 4 * 3 * 6 * (3 * 4 + 2 * 5)
    assert expected_bytes("scan", CONFIG, shape) == 0
    assert expected_bytes("assemble", CONFIG, None) == 0


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: full (os error 28)")]
)
def test_a_full_disk(tmp_path, error):
    explained = explain_os_error(error, where="stage=scan", folder=tmp_path / "new", expected=3 * 2**20)
    assert explained.what.startswith("no room left on the disk: about 3.0 MiB wanted, ")
    assert explained.where == (
        f"stage=scan, {tmp_path}/new, {error}; unfinished files were removed, published ones are whole"
    )
    assert explained.do == "free some space, or output_dir= on another disk, then the same command again"


def test_a_forbidden_folder(tmp_path):
    error = PermissionError(errno.EACCES, "Permission denied", "x")
    assert str(explain_os_error(error, where="stage=scan", folder=tmp_path)) == (
        "access denied: [Errno 13] Permission denied: 'x'\n"
        f"  where: stage=scan, {tmp_path}\n"
        "  do:    check who may read and write there, or choose another output_dir="
    )


def test_other_errors_are_not_ours(tmp_path):
    assert explain_os_error(FileNotFoundError(2, "gone"), where="", folder=tmp_path) is None
    assert explain_os_error(ValueError("28"), where="", folder=tmp_path) is None


def test_real_writes_beyond_a_limit_are_recognised(tmp_path):
    done = subprocess.run([sys.executable, "-c", FILL, tmp_path], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first.startswith("no room left on the disk: about 0.0 MiB wanted, ")
    assert second == first


def test_room_is_measured_where_the_folder_will_be(tmp_path):
    assert nearest_existing(tmp_path / "a" / "b") == tmp_path
    assert free_bytes(tmp_path / "a" / "b") > 0
