from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from instruments.errors import CheckpointError
from instruments.safetensors_files import EntryReader, load_tensors, read_header, save_tensors


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


def test_threads_open_a_file_once(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries, opened, real = read_header(shard), [], Path.open

    def open_slowly(path: Path, mode: str) -> Any:
        opened.append(path)
        sleep(0.02)
        return real(path, mode)

    monkeypatch.setattr(Path, "open", open_slowly)
    with EntryReader() as reader, ThreadPoolExecutor(len(entries)) as threads:
        found = list(threads.map(reader.read, entries.values(), entries))
    assert opened == [shard]
    assert {name: tuple(tensor.shape) for name, tensor in zip(entries, found, strict=True)} == {
        name: entry.shape for name, entry in entries.items()
    }


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda path: path.unlink(), "model.safetensors is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-6]), "model.safetensors is damaged: "),
        (lambda path: path.write_bytes(path.read_bytes() + b"xyz"), "model.safetensors is damaged: "),
        (lambda path: path.write_bytes(b"\x7f" * 8), "model.safetensors is damaged: "),
        (
            lambda path: write_raw(path, b'{"a": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}', bytes(8)),
            "model.safetensors is damaged: tensors of C64 cannot be read",
        ),
    ],
)
def test_damaged_files(shard: Path, damage: Callable[[Path], object], what: str) -> None:
    damage(shard)
    with pytest.raises(CheckpointError) as caught:
        read_header(shard)
    assert caught.value.what.startswith(what)
    assert (caught.value.where, caught.value.do) == (str(shard), "download or copy the file again")


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
