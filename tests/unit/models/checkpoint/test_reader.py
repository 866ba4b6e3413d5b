import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from instruments.dtypes import FLOATING
from instruments.errors import CheckpointError
from models.checkpoint.folder import list_shards
from models.checkpoint.shards import ShardReader


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


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    save_file({"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)}, tmp_path / "model.safetensors")
    with ShardReader(tmp_path) as reader:
        assert reader.tensor("scalar").item() == 2.5
        assert reader.tensor("empty").shape == (0, 4)


def test_shards_are_found_by_the_index(tmp_path: Path) -> None:
    parts = {"first": torch.ones(2, 3), "second": torch.ones(5)}
    for name, tensor in parts.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in parts}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with ShardReader(tmp_path) as reader:
        assert reader.shape("first") == (2, 3)
        assert torch.equal(reader.tensor("second"), parts["second"])


def test_an_index_beside_a_whole_file_is_not_read(tmp_path: Path) -> None:
    """transformers prefers model.safetensors, too: the scan and the experts come from the same weights."""
    save_file({"a": torch.zeros(4)}, tmp_path / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors", "b": "missing.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.ones(4)}, tmp_path / "model.safetensors")
    with ShardReader(tmp_path) as reader:
        assert reader.tensor("a").sum() == 4
    assert [path.name for path in list_shards(tmp_path)] == ["model.safetensors"]


def test_one_file_is_read_as_a_checkpoint_is(tmp_path: Path) -> None:
    path = tmp_path / "layer.safetensors"
    save_file({"a": torch.ones(4)}, path)
    with ShardReader(path) as reader:
        assert reader.tensor("a").sum() == 4


def test_what_is_read_is_the_readers_own(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4)}, tmp_path / "model.safetensors")
    with ShardReader(tmp_path) as reader:
        reader.tensor("a").fill_(1)
        assert not reader.tensor("a").any()


def test_a_closed_reader_opens_again(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "model.safetensors")
    reader = ShardReader(tmp_path)
    reader.tensor("a")
    reader.close()
    assert reader.tensor("a").sum() == 4
    reader.close()


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
