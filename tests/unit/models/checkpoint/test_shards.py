import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from instruments.dtypes import FLOATING
from instruments.errors import CheckpointError
from models.checkpoint.folder import list_shards
from models.checkpoint.shards import ShardReader, ShardWriter


def test_shards_are_named_and_indexed_as_transformers_does(tmp_path: Path) -> None:
    tensors = {name: torch.full((5,), float(i)) for i, name in enumerate("abcde")}
    with ShardWriter(tmp_path, max_shard_bytes=40) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    first, second, third = (f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3))
    assert index == {
        "metadata": {"total_size": 100},
        "weight_map": {"a": first, "b": first, "c": second, "d": second, "e": third},
    }
    assert {path.name for path in tmp_path.iterdir()} == {first, second, third, "model.safetensors.index.json"}
    with ShardReader(tmp_path) as reader:
        assert all(torch.equal(reader.tensor(name), tensor) for name, tensor in tensors.items())


def test_views_are_written_as_they_look(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    with ShardWriter(tmp_path) as writer:
        writer.add("transposed", base.T)
        writer.add("slice", base[:, 1:3])
        writer.add("row", base[1])
        writer.add("again", base[1])
    written = load_file(tmp_path / "model.safetensors")
    assert torch.equal(written["transposed"], base.T)
    assert torch.equal(written["slice"], base[:, 1:3])
    assert torch.equal(written["row"], base[1])
    assert torch.equal(written["again"], base[1])
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]  # one shard needs no index


def test_a_name_is_written_once(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path)
    writer.add("a", torch.ones(2))
    with pytest.raises(CheckpointError) as caught:
        writer.add("a", torch.ones(2))
    assert str(caught.value) == f"tensor a was already written\n  where: {tmp_path}"


def test_a_failed_write_leaves_no_checkpoint(tmp_path: Path) -> None:
    def fail() -> None:
        with ShardWriter(tmp_path, max_shard_bytes=8) as writer:
            writer.add("a", torch.ones(2))
            writer.add("b", torch.ones(2))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_users_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_args: object, **_more: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("models.checkpoint.shards.save_file", no_space)
    writer = ShardWriter(tmp_path)
    writer.add("a", torch.ones(2))
    with pytest.raises(CheckpointError) as caught:
        writer.close()
    assert str(caught.value) == (
        "cannot write a shard: I/O error: No space left on device (os error 28)\n"
        f"  where: {tmp_path / 'shard-00000.partial'}\n"
        "  do:    free disk space or choose another output_dir"
    )


def test_what_was_written_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lossy(tensors: dict[str, torch.Tensor], path: Path, **more: object) -> None:
        save_file({name: tensor.half() for name, tensor in tensors.items()}, path, **more)

    monkeypatch.setattr("models.checkpoint.shards.save_file", lossy)
    writer = ShardWriter(tmp_path)
    writer.add("a", torch.ones(2))
    with pytest.raises(CheckpointError) as caught:
        writer.close()
    assert caught.value.what == "what was written is not what was given: a"


def test_tensors_come_back_bit_for_bit_in_every_format_of_weights(tmp_path: Path) -> None:
    values = torch.linspace(-3, 3, 21).view(3, 7)
    tensors = {name: values.to(getattr(torch, name)) for name in FLOATING}
    save_file(tensors, tmp_path / "model.safetensors")
    with ShardReader(tmp_path) as reader:
        assert set(reader.names) == set(tensors)
        for name, tensor in tensors.items():
            read = reader.tensor(name)
            assert reader.dtype(name) == read.dtype == tensor.dtype
            assert reader.shape(name) == tuple(read.shape) == (3, 7)
            assert torch.equal(read.view(torch.uint8), tensor.view(torch.uint8))


def test_an_index_beside_a_whole_file_is_not_read(tmp_path: Path) -> None:
    """transformers prefers model.safetensors, too: the scan and the experts come from the same weights."""
    save_file({"a": torch.zeros(4)}, tmp_path / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors", "b": "missing.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.ones(4)}, tmp_path / "model.safetensors")
    with ShardReader(tmp_path) as reader:
        assert reader.tensor("a").sum() == 4
    assert [path.name for path in list_shards(tmp_path)] == ["model.safetensors"]


def test_what_is_read_is_the_readers_own(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4)}, tmp_path / "model.safetensors")
    with ShardReader(tmp_path) as reader:
        reader.tensor("a").fill_(1)
        assert not reader.tensor("a").any()


def test_unknown_tensor(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "model.safetensors")
    with ShardReader(tmp_path) as reader, pytest.raises(CheckpointError) as caught:
        reader.tensor("b")
    assert str(caught.value) == "there is no tensor b\n  do:    check that the checkpoint is complete"


def test_a_file_cut_short_while_in_use_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(400)}, path)
    with ShardReader(tmp_path) as reader:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 4)
        with pytest.raises(CheckpointError) as caught:
            reader.tensor("a")
    assert str(caught.value) == f"model.safetensors was cut short while in use\n  where: {path}, a"
