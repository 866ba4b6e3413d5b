"""Sources that cannot be carved are refused by their settings and headers, with all faults at once."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from pico import change_config, edited_tensors, write_pico
from zoo.checkpoints import write_checkpoint

from instruments.errors import CheckpointError, ConfigError
from models import check
from models.check import check_source
from models.config import ModelConfig
from models.quantization import stored_quantization
from models.source import EMBEDDED

INDEX = "model.safetensors.index.json"
NF4 = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
INT8 = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}}
GPTQ = {"quantization_config": {"quant_method": "gptq"}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_pico(tmp_path_factory.mktemp("whole"), "qwen2", max_shard_size="12KB")


@pytest.fixture
def folder(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "model"))


def faults(folder, **settings):
    return check_source(ModelConfig(kind="local", path=str(folder), **settings))


def test_whole_checkpoints_have_no_faults(folder):
    assert len(list(folder.glob("*.safetensors"))) > 2
    others = {"self_attn.rotary_emb.inv_freq": torch.ones(3)}  # in old checkpoints
    # Scales of a cache in FP8.
    others |= dict.fromkeys(("self_attn.kv_scale", "self_attn.k_scale", "self_attn.v_proj.v_scale"), torch.ones(1))
    buffers = {f"model.layers.0.{name}": tensor.clone() for name, tensor in others.items()}
    with edited_tensors(folder) as tensors:
        tensors.update(buffers)
    assert faults(folder) == check_source(ModelConfig()) == []


def test_places_that_are_no_checkpoint(folder, tmp_path):
    for path, what, where in (
        (tmp_path / "gone", "does not exist", str(tmp_path / "gone")),
        (folder / "config.json", "is a file, not a folder", str(folder / "config.json")),
        (tmp_path, "cannot read config.json", str(tmp_path)),
        (Path("a" * 5000), "cannot be opened (File name too long)", "a" * 5000),
    ):
        (error,) = faults(path)
        assert (what in error.what, error.where) == (True, where)
        assert error.do.startswith("give ")
    (error,) = check_source(ModelConfig(kind="local"))
    assert isinstance(error, ConfigError)
    assert error.where == "model.path"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "config.json is no JSON"),
        ("[]", "config.json holds no object"),
        ('{"text_config": [{"attn_implementation": "org/kernel"}]}', "config.json names code of the hub"),
        ('{"a":' * 900 + '{"_attn_implementation": "org/kernel"}' + "}" * 900, "config.json names code of the hub"),
        ("[" * 200_000, "config.json is no JSON: it is nested too deeply"),
    ],
)
def test_broken_config(folder, text, reason):
    (folder / "config.json").write_text(text)
    assert faults(folder)[0].what.startswith(reason)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_anywhere_in_the_config(folder, number):
    path = folder / "config.json"
    path.write_text(path.read_text().rstrip().removesuffix("}") + f', "of_others": [{number}]}}')
    assert faults(folder)[0].what.startswith("config.json is no JSON: Out of range float values")


def without_weights(folder):
    for path in folder.glob("model*"):
        path.unlink()


def only_pickles(folder):
    without_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"never opened")


@pytest.mark.parametrize(
    ("damage", "what", "do"),
    [
        (only_pickles, "pickle checkpoint refused: pytorch_model.bin can run any", "give a safetensors checkpoint"),
        (without_weights, "no model.safetensors or model.safetensors.index.json", "give a safetensors checkpoint"),
        (lambda folder: (folder / INDEX).unlink(), "no model.safetensors or", f"copy {INDEX} from the source of these"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "adapter_config.json beside", "merge the"),
        (lambda folder: (folder / INDEX).write_text("{}"), "unreadable shard index (KeyError", "download or copy"),
        (lambda folder: (folder / INDEX).write_text("[" * 200_000), "unreadable shard index (ValueError", "download"),
        (lambda folder: edit_index(folder, "\ud800"), "unreadable shard index", "download"),
        *(
            (lambda folder, name=name: edit_index(folder, name), "unreadable shard index", "download")
            for name in ("../other.safetensors", "/etc/passwd", "a/b", "..", "", "a\0b")
        ),
    ],
)
def test_weights_that_cannot_be_found(folder, damage, what, do):
    damage(folder)
    error = faults(folder)[0]
    assert isinstance(error, CheckpointError)
    assert error.what.startswith(what)
    assert error.do.startswith(do)


def edit_index(folder, shard):
    """Put one more tensor into the index."""
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.extra.weight"] = shard
    (folder / INDEX).write_text(json.dumps(index))


def test_index_and_shards_must_agree_and_every_damaged_shard_is_named(folder):
    missing, cut, corrupt, *_, whole = sorted(folder.glob("*.safetensors"))
    edit_index(folder, whole.name)
    (error,) = faults(folder)
    assert error.what.endswith("not in the shard the index names: model.extra.weight")
    assert error.where == str(folder / INDEX)
    missing.unlink()
    cut.write_bytes(cut.read_bytes()[:-10])
    corrupt.write_bytes(b"\x40" + bytes(7) + b"\x00" * 200)
    assert [error.where for error in faults(folder)] == [str(missing), str(cut), str(corrupt)]
    names = {f"model.layers.{layer}.x": f"shard-{layer:06}.safetensors" for layer in range(20_000)}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    (error,) = faults(folder)
    assert error.what.startswith("20,000 of 20,000 shards are missing: shard-000000.safetensors,")
    assert len(str(error)) < 500


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", INDEX, "more.safetensors"])
def test_pipes_and_devices_are_not_read(folder, file):
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (folder / file).unlink(missing_ok=True)
        make(folder / file)
        assert faults(folder)[0].what.startswith(f"{file}: a pipe, a socket or a device")


def test_a_config_that_no_decoder_has_and_damage_are_reported_together(folder):
    change_config(folder, is_causal=False)
    next(folder.glob("*.safetensors")).unlink()
    config, _damage = faults(folder)
    assert config.what == "with attention to later tokens this is no model of the next token"


@pytest.mark.parametrize(
    ("changes", "what", "where"),
    [
        (GPTQ, "weights quantised by gptq cannot be sliced", "quantization_config in config.json"),
        *(
            ({key: value}, "with attention to later tokens this is no model of the next token", f"{key} in config.json")
            for key, value in (("is_causal", False), ("use_bidirectional_attention", True))
        ),
        ({"dtype": None, "torch_dtype": "torch.float64"}, "transformers' kernels for experts", "dtype in config.json"),
        ({"num_hidden_layers": 10**7}, "config.json says more layers than", "num_hidden_layers=10000000"),
    ],
)
def test_configurations_that_cannot_be_carved(folder, changes, what, where):
    change_config(folder, **changes)
    (error,) = faults(folder)
    assert (error.what[: len(what)], error.where) == (what, where)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("model_type", "qwen9"), ("layer_types", ["full_attention"]), ("layer_types", "full_attention")),
        *(("intermediate_size", [40, 40]), ("hidden_size", -24), ("num_hidden_layers", 0), ("vocab_size", "many")),
        *(("hidden_act", ["silu"]), ("rope_scaling", "yarn"), ("dtype", "load"), ("text_config", 7)),
        *(("quantization_config", [1]), ("vocab_size", 10**12)),
    ],
)
def test_values_that_no_model_has_are_one_error(folder, key, value):
    change_config(folder, **{key: value})
    assert [type(error) for error in faults(folder)] == [CheckpointError]


def test_a_key_of_a_wrapper_about_its_images_refuses_nothing():
    """PaliGemma 2's, for tokens of a prompt with an image; its text is causal."""
    assert [*check.check_features({"text_config": {"use_bidirectional_attention": True}})] == []


def test_settings_and_source_are_checked_together(folder):
    change_config(folder, is_causal=False, quantization_config={"quant_method": "awq"})
    assert [error.what for error in faults(folder)] == [
        "weights quantised by awq cannot be sliced",
        "with attention to later tokens this is no model of the next token",
    ]


@pytest.mark.parametrize(
    ("name", "change", "what"),
    [
        *(
            (name, lambda tensor: tensor[:-1].clone(), "1 tensors do not have the shape that config.json says")
            for name in (
                "model.layers.1.self_attn.q_proj.weight",
                "model.layers.0.mlp.down_proj.weight",
                "model.embed_tokens.weight",
                "lm_head.weight",
            )
        ),
        ("lm_head.weight", None, "1 tensors are missing"),
        ("model.layers.1.mlp.gate_proj.weight", None, "1 tensors are missing"),
        ("adapter.0", lambda _none: torch.ones(2), "1 tensors are unknown to this architecture"),
    ],
)
def test_tensors_that_config_does_not_describe(folder, name, change, what):
    with edited_tensors(folder) as tensors:
        old = tensors.pop(name, None)
        if change is not None:
            tensors[name] = change(old)
    (error,) = faults(folder)
    assert error.what == what
    assert error.where.startswith(name)


@pytest.mark.parametrize(("name", "dtype"), [("model.norm.weight", "U32"), ("model.embed_tokens.weight", "I32")])
def test_weights_are_floating_point_numbers(folder, name, dtype):
    """The bytes of F32 numbers, read as integers, are weights up to 2³¹."""
    shard = folder / json.loads((folder / INDEX).read_text())["weight_map"][name]
    content = shard.read_bytes()
    place = content.index(f'"{name}":'.encode())
    shard.write_bytes(content[:place] + content[place:].replace(b'"F32"', f'"{dtype}"'.encode(), 1))
    (error,) = faults(folder)
    assert error.what.startswith("1 tensors are not stored in a format of weights")
    assert error.where == f"{folder}: {name} is {dtype} in {shard.name}"
    assert error.do


@pytest.mark.parametrize(
    ("config", "kind", "allowed"),
    [
        ({}, None, {"none", "nf4", "fp4", "int8"}),
        ({"quantization_config": None}, None, {"none", "nf4", "fp4", "int8"}),
        (NF4, "nf4", {"none", "nf4"}),
        (INT8, "int8", {"none", "int8"}),
        (GPTQ, "gptq", set()),
        ({"quantization_config": {"load_in_4bit": True}}, "fp4", {"none", "fp4"}),
        ({"quantization_config": {"bits": 3}}, "unknown", set()),
    ],
)
def test_how_a_checkpoint_is_stored_and_how_it_may_be_loaded(config, kind, allowed):
    assert stored_quantization(config) == kind
    for asked in ("none", "nf4", "fp4", "int8"):
        assert (asked in allowed) is ([*check.check_quantization(ModelConfig(quantization=asked), config)] == [])


@pytest.mark.parametrize(
    ("settings", "config", "what"),
    [
        ({"quantization": "fp4"}, {}, "model.quantization=fp4 needs the package bitsandbytes"),
        ({}, INT8, "a checkpoint stored in int8 needs the package bitsandbytes"),
    ],
)
def test_without_bitsandbytes(monkeypatch, settings, config, what):
    monkeypatch.setattr(check, "find_spec", lambda _name: None)
    (error,) = check.check_quantization(ModelConfig(**settings), config)
    assert error.what == what
    assert [*check.check_quantization(ModelConfig(), {})] == []


@pytest.fixture
def embedded(tmp_path):
    return shutil.copytree(EMBEDDED, tmp_path / "model")


def test_weights_in_fp8_without_scales_are_one_error(embedded):
    with edited_tensors(embedded) as tensors:
        tensors.update({name: t.to(torch.float8_e4m3fn) for name, t in tensors.items() if "proj" in name})
    assert faults(embedded)[0].what.startswith("FP8 weight without a scale")


def test_a_link_to_a_file_elsewhere_is_not_copied_into_a_carve(embedded, tmp_path):
    (tmp_path / "secret").write_text("x")
    (embedded / "LICENSE").unlink(missing_ok=True)
    (embedded / "LICENSE").symlink_to(tmp_path / "secret")
    error = faults(embedded)[0]
    assert (error.where, "outside of the checkpoint" in error.what) == (str(embedded / "LICENSE"), True)


def test_the_links_of_the_hubs_cache_are_its_own_files(embedded, tmp_path):
    snapshot, blobs = tmp_path / "models--a--b/snapshots/abc", tmp_path / "models--a--b/blobs"
    for place in (snapshot, blobs, shared := tmp_path / "blobs/0a"):
        place.mkdir(parents=True)
    for file in embedded.iterdir():
        if file.name == "tokenizer.json":  # of any repository with the same file
            (shared / file.name).touch()
            (blobs / file.name).symlink_to(shared / file.name)
        shutil.copyfile(file, blobs / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert faults(snapshot) == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [("next_month_looped", "runs its layers several times"), ("gemma3n_text", "several hidden states")],
)
def test_layers_that_do_not_run_one_by_one_once_are_refused(name, reason, tmp_path):
    (found,) = faults(write_checkpoint(name, tmp_path))
    assert reason in found.what
