import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from instruments.errors import CheckpointError
from instruments.safetensors_files import MAX_HEADER_BYTES, read_header
from models.checkpoint.folder import require_folder


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    tensors = {"a": torch.zeros(3, 5, dtype=torch.bfloat16), "b": torch.zeros(7), "empty": torch.zeros(0, 4)}
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def write_raw(path: Path, header: bytes, data: bytes = b"") -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def test_lists_every_tensor_and_where_it_lies(shard: Path) -> None:
    entries = read_header(shard)
    assert {name: (entry.dtype, entry.shape, entry.nbytes) for name, entry in entries.items()} == {
        "a": ("BF16", (3, 5), 30),
        "b": ("F32", (7,), 28),
        "empty": ("F32", (0, 4), 0),
    }
    assert max(entry.offset + entry.nbytes for entry in entries.values()) == shard.stat().st_size


def test_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "model-00002-of-00003.safetensors"
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert str(caught.value) == (
        f"model-00002-of-00003.safetensors is missing\n  where: {path}\n  do:    download or copy the file again"
    )


def test_truncated_data(shard: Path) -> None:
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-6])
    with pytest.raises(CheckpointError) as caught:
        read_header(shard)
    assert caught.value.what == (
        f"model.safetensors is damaged: truncated: {len(whole) - 6} bytes, the header says {len(whole)}"
    )


def test_bytes_after_the_last_tensor(shard: Path) -> None:
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes() + b"xyz")
    with pytest.raises(CheckpointError) as caught:
        read_header(shard)
    assert caught.value.what == f"model.safetensors is damaged: too long: {size + 3} bytes, the header says {size}"


@pytest.mark.parametrize("size", [0, 5, 8])
def test_too_short_for_a_header(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x7f" * size)
    with pytest.raises(CheckpointError, match=f"header length [0-9]+ does not fit a file of {size} bytes"):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b'{"a": ', "JSONDecodeError: Expecting value: line 1 column 7 (char 6)"),
        (b"[1, 2]", "TypeError: cannot convert dictionary update sequence element #0 to a sequence"),
        (b"\xff\xfe\xff", "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (b'{"a": {"dtype": "F32", "shape": [2]}}', "KeyError: 'data_offsets'"),
        (b'{"a": {"dtype": "Q4", "shape": [2], "data_offsets": [0, 8]}}', "KeyError: 'Q4'"),
        (
            b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}}',
            "ValueError: F32 [2] needs 8 bytes, has 9",
        ),
    ],
)
def test_unreadable_header(tmp_path: Path, header: bytes, reason: str) -> None:
    path = tmp_path / "model.safetensors"
    write_raw(path, header, bytes(9))
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert caught.value.what == f"model.safetensors is damaged: unreadable header ({reason})"


@pytest.mark.parametrize("begin", [4, 12], ids=["overlap", "hole"])
def test_tensors_must_lie_side_by_side(tmp_path: Path, begin: int) -> None:
    path = tmp_path / "model.safetensors"
    first = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    second = {"dtype": "F32", "shape": [1], "data_offsets": [begin, begin + 4]}
    header = json.dumps({"a": first, "b": second}).encode()
    write_raw(path, header, bytes(begin + 4))
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert caught.value.what == f"model.safetensors is damaged: hole or overlap at byte {8 + len(header) + 8}"


@pytest.mark.parametrize(("name", "size"), [("config.json", 17), ("tokenizer_config.json", 17), ("tokenizer.json", 41)])
def test_json_larger_than_any_model_has(tmp_path: Path, name: str, size: int) -> None:
    """Too large files are not read at all: parsed JSON takes forty times the file's size in memory."""
    with (tmp_path / name).open("wb") as file:
        file.truncate(size * 2**20)
    with pytest.raises(CheckpointError) as caught:
        require_folder(tmp_path)
    assert str(caught.value).startswith(f"{name} has {size * 2**20:,} bytes, more than the ")


def test_json_that_nobody_reads_may_be_large(tmp_path: Path) -> None:
    """Trainer's log of a long training has a line for each step."""
    with (tmp_path / "trainer_state.json").open("wb") as file:
        file.truncate(17 * 2**20)
    assert require_folder(tmp_path) == tmp_path


def test_a_header_larger_than_any_checkpoint_has(tmp_path: Path) -> None:
    length = MAX_HEADER_BYTES + 1
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(length + 8)
    with pytest.raises(CheckpointError, match="a header of 16,777,217 bytes, more than the 16,777,216 it may have"):
        read_header(tmp_path / "model.safetensors")


def test_json_of_more_values_than_any_model_has(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(f"[{','.join(['0'] * (2**21 + 2))}]")
    with pytest.raises(CheckpointError, match="2,097,154 values, more than the 2,097,152 that it may have"):
        require_folder(tmp_path)
