import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from instruments.errors import CheckpointError
from instruments.safetensors_files import MAX_HEADER_BYTES, load_tensors, read_header, save_tensors


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


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda path: path.unlink(), "model.safetensors is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-6]), "model.safetensors is damaged: truncated: "),
        (lambda path: path.write_bytes(path.read_bytes() + b"xyz"), "model.safetensors is damaged: too long: "),
        *(
            (lambda path, size=size: path.write_bytes(b"\x7f" * size), "model.safetensors is damaged: header length")
            for size in (0, 5, 8)
        ),
    ],
)
def test_damaged_files(shard: Path, damage: Callable[[Path], object], what: str) -> None:
    damage(shard)
    with pytest.raises(CheckpointError) as caught:
        read_header(shard)
    assert caught.value.what.startswith(what)
    assert (caught.value.where, caught.value.do) == (str(shard), "download or copy the file again")


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b'{"a": ', "JSONDecodeError: "),
        (b"[1, 2]", "TypeError: "),
        (b"\xff\xfe\xff", "UnicodeDecodeError: "),
        (b'{"a": {"dtype": "F32", "shape": [2]}}', "KeyError: 'data_offsets'"),
        (b'{"a": {"dtype": "Q4", "shape": [2], "data_offsets": [0, 8]}}', "KeyError: 'Q4'"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}}', "ValueError: F32 [2] needs 8 bytes"),
    ],
)
def test_unreadable_header(tmp_path: Path, header: bytes, reason: str) -> None:
    path = tmp_path / "model.safetensors"
    write_raw(path, header, bytes(9))
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert caught.value.what.startswith(f"model.safetensors is damaged: unreadable header ({reason}")


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


def test_a_header_larger_than_any_checkpoint_has(tmp_path: Path) -> None:
    length = MAX_HEADER_BYTES + 1
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(length + 8)
    with pytest.raises(CheckpointError, match="a header of 16,777,217 bytes, more than the 16,777,216 it may have"):
        read_header(tmp_path / "model.safetensors")


def test_tensors_and_facts_come_back_and_a_flipped_bit_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "o.safetensors"
    tensors = {"a": torch.randn(3, 5).bfloat16().T, "empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5)}
    save_tensors(path, tensors, text="é", numbers={1: [0.1 + 0.2, float("nan")]})
    found, facts = load_tensors(path)
    assert {name: (one.dtype, one.shape) for name, one in found.items()} == {
        name: (one.dtype, one.shape) for name, one in tensors.items()
    }
    assert all(torch.equal(found[name], one) for name, one in tensors.items())
    assert facts["text"] == "é"
    assert facts["numbers"]["1"][0] == 0.1 + 0.2
    content = path.read_bytes()
    for position in range(8, len(content), 7):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        with pytest.raises(CheckpointError):
            load_tensors(path)
