"""Headers of a folder: weights stored in 4 or 8 bits are one tensor each; no file is larger than any model's."""

import functools
import json
import shutil

import pytest
import torch
from numerics.quantised_models import STORED, decoded_weights, store_quantised, write_plain
from pico import edited_tensors
from transformers import AutoModelForCausalLM

from instruments.errors import CheckpointError
from models.checkpoint.folder import PackedEntry, read_checkpoint, require_folder
from models.checkpoint.shards import ShardReader

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_plain(tmp_path_factory.mktemp("plain"), "qwen2")


@pytest.fixture(scope="module", params=STORED)
def stored(request, plain, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, store_quantised(plain, folder, request.param, max_shard_size="3KB")


@pytest.fixture(scope="module")
def once(plain, tmp_path_factory):
    """Kind → its checkpoint in one file, written once."""
    return functools.cache(lambda kind: store_quantised(plain, tmp_path_factory.mktemp(kind), kind))


@pytest.fixture
def store(once, tmp_path):
    """Write a checkpoint of a kind that a test may change."""
    return lambda kind: shutil.copytree(once(kind), tmp_path / kind)


def test_names_shapes_and_formats_are_those_of_the_plain_checkpoint(plain, stored):
    """Some packed weights are in another shard than the tensors that decode them."""
    kind, folder = stored
    packed = [entry for entry in read_checkpoint(folder).values() if isinstance(entry, PackedEntry)]
    assert len({part.path for entry in packed for part in entry.parts.values()}) > 1
    with ShardReader(folder) as reader, ShardReader(plain) as expected:
        assert set(reader.names) == set(expected.names)
        for name in expected.names:
            assert read_checkpoint(folder)[name].shape == expected.tensor(name).shape == reader.tensor(name).shape
            assert reader.dtype(name) == torch.bfloat16 == reader.tensor(name).dtype
    assert {entry.kind for entry in packed} == {kind.removesuffix("-nested")}


def test_weights_are_those_that_transformers_decodes(stored):
    _kind, folder = stored
    model = AutoModelForCausalLM.from_pretrained(folder)
    weights = dict(decoded_weights(model))
    with ShardReader(folder) as reader:
        for name, weight in weights.items():
            assert torch.equal(reader.tensor(f"{name}.weight"), weight.bfloat16()), name
        for name in reader.names - {f"{name}.weight" for name in weights}:
            assert torch.equal(reader.tensor(name), model.get_parameter(name)), name


@pytest.mark.parametrize(
    ("named", "dtype"),
    [({"dtype": "float16"}, torch.float16), ({"torch_dtype": "torch.float32"}, torch.float32), ({}, torch.bfloat16)],
)
def test_int8_becomes_what_the_config_names(store, named, dtype):
    folder = store("int8")
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(config | named))
    with ShardReader(folder) as reader:
        assert reader.dtype(UP) == reader.tensor(UP).dtype == dtype


def test_bytes_under_the_name_of_another_format(store):
    """Packed bytes stored as bfloat16, as in checkpoints for sharded training."""
    folder = store("nf4")
    with ShardReader(folder) as reader:
        expected = reader.tensor(UP)
    with edited_tensors(folder) as tensors:
        tensors[UP] = tensors[UP].flatten().view(torch.bfloat16)[:, None]
    with ShardReader(folder) as reader:
        assert torch.equal(reader.tensor(UP), expected)


STATE = f"{UP}.quant_state.bitsandbytes__nf4"
SCALES, LAYOUT = UP.replace("weight", "SCB"), UP.replace("weight", "weight_format")


@pytest.mark.parametrize(
    ("kind", "name", "change", "what"),
    [
        ("int8", UP, None, f"quantised weight {UP} lacks {UP}"),
        *(("fp4", f"{UP}.{part}", None, f"quantised weight {UP} lacks") for part in ("absmax", "quant_map")),
        ("nf4", f"{UP}.absmax", lambda old: old.view(torch.int32), "a part of a quantised weight is I32, not F32"),
        ("nf4-nested", f"{UP}.absmax", lambda old: old.view(torch.int8), "a part of a quantised weight is I8, not U8"),
        ("nf4-nested", f"{UP}.nested_quant_map", lambda old: old.view(torch.int32), "a part of a quantised weight is"),
        ("int8", SCALES, lambda old: old.view(torch.int32), "a part of a quantised weight is I32, not F32"),
        ("nf4", UP, lambda old: old[:-3].clone(), "a weight of (72, 40) needs 1440 bytes in 45 blocks, has 1437 in 45"),
        ("nf4", STATE, lambda _old: torch.ones(3, dtype=torch.uint8), "unreadable quantisation state (JSONDecodeError"),
        ("nf4", STATE, lambda _old: torch.tensor([*b"{}"], dtype=torch.uint8), "unreadable quantisation state (KeyErr"),
        ("int8", LAYOUT, lambda _old: torch.tensor(2, dtype=torch.uint8), "int8 weights are not stored row by row"),
    ],
)
def test_packed_weights_that_cannot_be_decoded(store, kind, name, change, what):
    folder = store(kind)
    with edited_tensors(folder) as tensors:
        old = tensors.pop(name, None)
        if change is not None:
            tensors[name] = change(old)
    with pytest.raises(CheckpointError) as caught:
        ShardReader(folder)
    assert caught.value.what.startswith(what)
    assert UP.removesuffix("weight") in str(caught.value)
    assert caught.value.do


@pytest.mark.parametrize(
    ("name", "size"), [("config.json", 17), ("tokenizer_config.json", 17), ("tokenizer.json", 41), ("tekken.json", 41)]
)
def test_json_larger_than_any_model_has(tmp_path, name, size):
    """Too large files are not read at all: parsed JSON takes forty times the file's size in memory."""
    for file in ("trainer_state.json", name):  # nobody reads the first
        assert require_folder(tmp_path) == tmp_path
        with (tmp_path / file).open("wb") as opened:
            opened.truncate(size * 2**20)
    with pytest.raises(CheckpointError, match=f"{name} has {size * 2**20:,} bytes, more than the "):
        require_folder(tmp_path)


def test_json_of_more_values_than_any_model_has(tmp_path):
    (tmp_path / "tokenizer.json").write_text(f"[{','.join(['0'] * (2**21 + 2))}]")
    with pytest.raises(CheckpointError, match="2,097,154 values, more than the 2,097,152 that it may have"):
        require_folder(tmp_path)
