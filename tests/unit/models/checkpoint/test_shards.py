import json
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from instruments.dtypes import FLOATING
from instruments.errors import CheckpointError
from models.checkpoint.folder import list_shards
from models.checkpoint.shards import ShardReader, ShardWriter


def test_shards_are_named_and_indexed_as_transformers_does(tmp_path):
    """A tensor larger than a shard, as c, gets its own."""
    sizes = {"a": 5, "b": 5, "c": 11, "d": 1, "e": 3}
    tensors = {name: torch.full((size,), float(size)) for name, size in sizes.items()}
    with ShardWriter(tmp_path, max_shard_bytes=40) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    first, second, third = (f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3))
    assert index == {
        "metadata": {"total_size": 100},
        "weight_map": {"a": first, "b": first, "c": second, "d": third, "e": third},
    }
    assert {path.name for path in tmp_path.iterdir()} == {first, second, third, "model.safetensors.index.json"}
    with ShardReader(tmp_path) as reader:
        assert all(torch.equal(reader.tensor(name), tensor) for name, tensor in tensors.items())


def test_views_are_written_as_they_look(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    views = {"transposed": base.T, "slice": base[:, 1:3], "row": base[1], "again": base[1]}
    with ShardWriter(tmp_path) as writer:
        for name, view in views.items():
            writer.add(name, view)
    written = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(written[name], view) for name, view in views.items())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]  # one shard needs no index


def test_a_name_is_written_once(tmp_path):
    writer = ShardWriter(tmp_path)
    writer.add("a", torch.ones(2))
    with pytest.raises(CheckpointError, match="tensor a was already written"):
        writer.add("a", torch.ones(2))


def test_a_failed_write_leaves_no_checkpoint(tmp_path):
    def fail():
        with ShardWriter(tmp_path, max_shard_bytes=8) as writer:
            writer.add("a", torch.ones(2))
            writer.add("b", torch.ones(2))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_users_error(tmp_path, monkeypatch):
    full = Mock(side_effect=SafetensorError("I/O error: No space left on device (os error 28)"))
    monkeypatch.setattr("models.checkpoint.shards.save_file", full)
    writer = ShardWriter(tmp_path)
    writer.add("a", torch.ones(2))
    with pytest.raises(CheckpointError, match=r"cannot write a shard: .*No space left on device") as caught:
        writer.close()
    assert caught.value.do == "free disk space or choose another output_dir"


def test_what_was_written_is_checked(tmp_path, monkeypatch):
    def lossy(tensors, path, **more):
        save_file({name: tensor.half() for name, tensor in tensors.items()}, path, **more)

    monkeypatch.setattr("models.checkpoint.shards.save_file", lossy)
    writer = ShardWriter(tmp_path)
    writer.add("a", torch.ones(2))
    with pytest.raises(CheckpointError, match="what was written is not what was given: a"):
        writer.close()


def test_tensors_come_back_bit_for_bit_in_every_format_of_weights(tmp_path):
    values = torch.linspace(-3, 3, 21).view(3, 7)
    tensors = {name: values.to(getattr(torch, name)) for name in FLOATING}
    save_file(tensors, tmp_path / "model.safetensors")
    with ShardReader(tmp_path) as reader:
        assert set(reader.names) == set(tensors)
        for name, tensor in tensors.items():
            read = reader.tensor(name)
            assert reader.dtype(name) == read.dtype == tensor.dtype
            assert tuple(read.shape) == (3, 7)
            assert torch.equal(read.view(torch.uint8), tensor.view(torch.uint8))


def test_an_index_beside_a_whole_file_is_not_read(tmp_path):
    """transformers prefers model.safetensors, too: the scan and the experts come from the same weights."""
    save_file({"a": torch.zeros(4)}, tmp_path / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors", "b": "missing.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.ones(4)}, tmp_path / "model.safetensors")
    with ShardReader(tmp_path) as reader:
        assert reader.tensor("a").sum() == 4
    assert [path.name for path in list_shards(tmp_path)] == ["model.safetensors"]


def test_a_closed_reader_opens_again_and_gives_tensors_of_their_own(tmp_path):
    save_file({"a": torch.ones(4)}, tmp_path / "model.safetensors")
    reader = ShardReader(tmp_path)
    reader.tensor("a").fill_(3)
    reader.close()
    assert reader.tensor("a").sum() == 4
    with pytest.raises(CheckpointError, match="there is no tensor b"):
        reader.tensor("b")
    reader.close()


def test_a_file_cut_short_while_in_use_is_an_error(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(400)}, path)
    with ShardReader(tmp_path) as reader:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 4)
        with pytest.raises(CheckpointError, match=r"model\.safetensors was cut short while in use") as caught:
            reader.tensor("a")
    assert caught.value.where == f"{path}, a"
