import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pico import write_pico
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from models.check import check_source
from models.config import ModelConfig, MoEShape
from models.emit import emit_checkpoint
from models.experts import ExpertWeights
from models.source import EMBEDDED, read_source_config, resolve_folder, source_cache_key
from models.targets.config import MOE_TARGETS


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pico(tmp_path_factory.mktemp("whole"), "qwen2", max_shard_size="12KB")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def local(folder: Path) -> ModelConfig:
    return ModelConfig(kind="local", path=str(folder))


def texts(folder: Path) -> list[str]:
    return [str(error) for error in check_source(local(folder))]


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_whole_checkpoints_have_no_faults(folder: Path) -> None:
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert texts(folder) == []
    assert check_source(ModelConfig()) == []


def test_embedded_and_local_folders(folder: Path) -> None:
    assert resolve_folder(ModelConfig()) == EMBEDDED
    assert resolve_folder(local(folder)) == folder
    assert read_source_config(ModelConfig())["intermediate_size"] == 1024


GIVE_FOLDER = "  do:    model.path=<folder with config.json and model.safetensors>"


def test_no_such_folder(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert texts(gone) == [f"no checkpoint: {gone} does not exist\n  where: model.path\n{GIVE_FOLDER}"]


def test_a_file_is_no_folder(folder: Path) -> None:
    file = folder / "config.json"
    assert texts(file) == [f"no checkpoint: {file} is a file, not a folder\n  where: model.path\n{GIVE_FOLDER}"]


def test_a_folder_without_config(tmp_path: Path) -> None:
    what = "no checkpoint: cannot read config.json (No such file or directory)"
    assert texts(tmp_path) == [f"{what}\n  where: {tmp_path}\n{GIVE_FOLDER}"]


def test_no_path_given() -> None:
    assert [str(error) for error in check_source(ModelConfig(kind="local"))] == [
        "model=local needs a folder\n  where: model.path\n  do:    model.path=<folder of the checkpoint>"
    ]


@pytest.mark.parametrize(("text", "reason"), [("{", "config.json is no JSON"), ("[]", "config.json holds no object")])
def test_broken_config(folder: Path, text: str, reason: str) -> None:
    (folder / "config.json").write_text(text)
    (error,) = check_source(local(folder))
    assert error.what.startswith(reason)


def test_config_without_sizes(folder: Path) -> None:
    edit_config(folder, hidden_size=None, vocab_size="many")
    assert texts(folder)[0] == (
        "config.json gives no number for hidden_size, vocab_size\n  do:    download or copy it again"
    )


def test_pickle_checkpoints_are_refused(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model-00001-of-00002.bin").write_bytes(b"never opened")
    (folder / "pytorch_model-00002-of-00002.bin").write_bytes(b"never opened")
    assert texts(folder) == [
        "pickle checkpoint refused: pytorch_model-00001-of-00002.bin, pytorch_model-00002-of-00002.bin "
        "can run any code when opened\n"
        f"  where: {folder}\n"
        "  do:    give a safetensors checkpoint, or convert one you trust: "
        "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
    ]


def test_no_weights_at_all(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    assert texts(folder) == [
        "no model.safetensors or model.safetensors.index.json\n"
        f"  where: {folder}\n"
        "  do:    give a safetensors checkpoint"
    ]


def test_shards_without_an_index(folder: Path) -> None:
    count = len([*folder.glob("*.safetensors")])
    (folder / "model.safetensors.index.json").unlink()
    (error,) = check_source(local(folder))
    assert error.do == f"copy model.safetensors.index.json from the source of these {count} shards"


def test_an_adapter_beside_the_weights(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    assert texts(folder) == [
        "adapter_config.json beside the weights: with peft installed, transformers loads other weights than are here\n"
        f"  where: {folder}\n"
        "  do:    merge the adapter (merge_and_unload), save the result in another folder, and carve that; or remove "
        "adapter_config.json"
    ]


def test_every_damaged_shard_is_named(folder: Path) -> None:
    missing, cut, corrupt = sorted(folder.glob("*.safetensors"))[:3]
    missing.unlink()
    size = cut.stat().st_size
    cut.write_bytes(cut.read_bytes()[:-10])
    corrupt.write_bytes(b"\x40" + bytes(7) + b"\x00" * 200)
    errors = check_source(local(folder))
    assert [error.what.split("(")[0] for error in errors] == [
        f"{missing.name} is missing",
        f"{cut.name} is damaged: truncated: {size - 10} bytes, the header says {size}",
        f"{corrupt.name} is damaged: unreadable header ",
    ]
    assert [error.where for error in errors] == [str(missing), str(cut), str(corrupt)]


def test_index_and_shards_must_agree(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra.weight"] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))
    total = len(index["weight_map"])
    assert texts(folder) == [
        f"1 of {total} tensors are not in the shard the index names: model.extra.weight\n"
        f"  where: {path}\n"
        "  do:    download or copy the checkpoint again"
    ]


def test_broken_index(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text("{}")
    assert texts(folder) == [
        f"unreadable shard index (KeyError: 'weight_map')\n  where: {path}\n  do:    download or copy it again"
    ]


@pytest.mark.parametrize(
    ("model_type", "what"),
    [
        ("gpt2", "architecture 'gpt2' has no gated FFN"),
        ("bert", "architecture 'bert' is not supported"),
        (None, "architecture None is not supported"),
    ],
)
def test_other_architectures_are_named_beside_the_supported(folder: Path, model_type: str | None, what: str) -> None:
    edit_config(folder, model_type=model_type)
    assert texts(folder) == [
        f"{what}\n"
        "  where: model_type in config.json\n"
        "  do:    choose a dense model of one of these: "
        "gemma2, gemma3_text, granite, llama, mistral, olmo2, phi3, qwen2, qwen3, smollm3"
    ]


def test_architecture_and_damage_are_reported_together(folder: Path) -> None:
    edit_config(folder, model_type="gpt2")
    next(folder.glob("*.safetensors")).unlink()
    assert len(texts(folder)) == 2


def test_a_moe_we_wrote_is_no_source(whole: Path, tmp_path: Path) -> None:
    shape = MoEShape(experts=3, n=8, top_k=2, always_on=0)
    slices = ExpertWeights(
        *(torch.zeros(3, 8, 24), torch.zeros(3, 8, 24), torch.zeros(3, 24, 8)),
        *(torch.zeros(0, 24), torch.zeros(0, 24), torch.zeros(24, 0)),
    )
    emit_checkpoint(
        whole,
        tmp_path,
        target=MOE_TARGETS["qwen2_moe"],
        shape=shape,
        routers=lambda _layer: torch.zeros(3, 24),
        experts=lambda _layer: slices,
    )
    AutoModelForCausalLM.from_pretrained(tmp_path)
    assert [error.what for error in check_source(local(tmp_path))] == ["architecture 'qwen2_moe' is not supported"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "weights quantised by gptq cannot be sliced\n"
            "  where: quantization_config in config.json\n"
            "  do:    give the unquantised checkpoint, or one stored by bitsandbytes",
        ),
        (
            {"mlp_bias": True},
            "an FFN with biases has no MoE counterpart\n"
            "  where: mlp_bias in config.json\n"
            "  do:    choose a model without them",
        ),
        *(
            (
                {key: value},
                "with attention to later tokens this is no model of the next token\n"
                f"  where: {key} in config.json\n"
                "  do:    choose a causal language model",
            )
            for key, value in (("is_causal", False), ("is_causal", None), ("use_bidirectional_attention", True))
        ),
        (
            {"dtype": None, "torch_dtype": "torch.float64"},
            "transformers' kernels for experts have no float64\n"
            "  where: dtype in config.json\n"
            "  do:    load it in float32 with transformers, write it by save_pretrained, and carve that",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4, "rope_type": "default"}}},
            "a position encoding of its own per layer has no MoE counterpart\n"
            "  where: rope_parameters in config.json\n"
            "  do:    choose a model with one for all layers",
        ),
    ],
)
def test_features_no_moe_can_say(folder: Path, changes: dict[str, object], text: str) -> None:
    edit_config(folder, **changes)
    assert texts(folder) == [text]


def test_format_and_place_are_checked_with_the_source(folder: Path) -> None:
    """All errors are reported at once; the embedded model passes the same checks."""
    edit_config(folder, mlp_bias=True, quantization_config={"quant_method": "awq"})
    model = ModelConfig(kind="local", path=str(folder), device_map="auto", cpu_memory="lots")
    assert [error.what for error in check_source(model)] == [
        "model.cpu_memory=lots is no amount of memory",
        "weights quantised by awq cannot be sliced",
        "an FFN with biases has no MoE counterpart",
    ]
    assert check_source(ModelConfig(quantization="nf4", device_map="auto", gpu_memory="20GiB")) == []


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Edit a checkpoint's tensors and write them as one shard."""
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_missing_tensors(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.gate_proj.weight"))
    assert texts(folder) == [
        "1 tensors are missing\n"
        "  where: model.layers.1.mlp.gate_proj.weight\n"
        "  do:    check that config.json belongs to these weights"
    ]


def test_unknown_tensors(folder: Path) -> None:
    extra = {f"adapter.{i}": torch.ones(i + 1) for i in range(4)}
    change_tensors(folder, lambda tensors: tensors.update(extra))
    assert texts(folder) == [
        "4 tensors are unknown to this architecture\n"
        "  where: adapter.0, adapter.1, adapter.2 ...\n"
        "  do:    check that config.json belongs to these weights"
    ]


def test_buffers_of_old_checkpoints_are_ignored(folder: Path) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    change_tensors(folder, lambda tensors: tensors.update(buffer))
    assert texts(folder) == []


def test_tensors_of_another_width(folder: Path) -> None:
    edit_config(folder, intermediate_size=41)
    (error,) = check_source(local(folder))
    assert error.what == "6 tensors do not have the shape that config.json says"
    assert error.where.startswith("model.layers.0.mlp.down_proj.weight is (24, 40), not (24, 41), ")


def test_identity_follows_all_that_decides_a_result(folder: Path) -> None:
    shard = next(folder.glob("*.safetensors"))
    before = source_cache_key(local(folder))
    shard.touch()
    (folder / "LICENSE").write_text("free")
    assert source_cache_key(local(folder)) == before
    edit_config(folder, rms_norm_eps=1e-5)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "merges.txt"):
        (folder / name).write_text("{}")
    times = shard.stat().st_atime_ns, shard.stat().st_mtime_ns
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=times)
    changed = source_cache_key(local(folder))["files"].items() - before["files"].items()
    assert {name for name, _hash in changed} >= {
        *("config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json", "merges.txt", shard.name)
    }


def test_ten_million_layers_are_compared_with_the_tensors_first(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=10**7, layer_types=None)
    began = time.monotonic()
    (text,) = texts(folder)
    assert time.monotonic() - began < 5
    assert text.startswith("config.json says 10,000,000 layers, and the weights are 27 tensors in all\n")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", -24),
        ("num_hidden_layers", 0),
        ("vocab_size", 10**12),
        ("num_key_value_heads", 2.0),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", float("inf")),
        ("rope_scaling", "yarn"),
        ("rope_scaling", {"type": "longrope", "original_max_position_embeddings": 0}),
        ("max_position_embeddings", "many"),
        ("tie_word_embeddings", "yes"),
        ("hidden_act", ["silu"]),
        ("torch_dtype", "load"),
        ("eos_token_id", {"a": 1}),
        ("quantization_config", [1]),
        ("layer_types", "full_attention"),
        ("layer_types", ["full_attention", "half_attention"]),
    ],
)
def test_values_that_no_model_has(folder: Path, key: str, value: object) -> None:
    edit_config(folder, **{key: value})
    (error,) = check_source(local(folder))
    assert error.what == "config.json holds values that no model has"
    assert error.where == f"{key}={value!r}"


def test_numbers_of_heads_that_do_not_fit(folder: Path) -> None:
    edit_config(folder, num_attention_heads=5)
    assert [error.what for error in check_source(local(folder))] == [
        "hidden_size=24 is no multiple of num_attention_heads=5, and there is no head_dim",
        "num_attention_heads=5 is no multiple of num_key_value_heads=2",
    ]


def test_kinds_of_fewer_layers(folder: Path) -> None:
    edit_config(folder, layer_types=["full_attention"])
    assert [error.what for error in check_source(local(folder))] == ["layer_types names 1 layers, num_hidden_layers=2"]


@pytest.mark.parametrize(
    "name",
    ["self_attn.q_proj.weight", "self_attn.k_proj.bias", "self_attn.o_proj.weight", "input_layernorm.weight"],
)
def test_shapes_of_attention_and_norms(folder: Path, name: str) -> None:
    whole = f"model.layers.1.{name}"
    change_tensors(folder, lambda tensors: tensors.update({whole: tensors[whole][:-1].clone()}))
    (error,) = check_source(local(folder))
    assert error.what == "1 tensors do not have the shape that config.json says"
    assert error.where.startswith(f"{whole} is ")


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])
def test_shapes_of_embeddings_and_the_last_norm(folder: Path, name: str) -> None:
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    assert [error.where.split(" ")[0] for error in check_source(local(folder))] == [name]


@pytest.mark.parametrize("dtype", ["U32", "I32"])
@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"]
)
def test_weights_are_floating_point_numbers(folder: Path, name: str, dtype: str) -> None:
    """The bytes of F32 numbers, read as integers, are weights up to 2³¹."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = folder / index["weight_map"][name]
    relabel(shard, name, dtype)
    (error,) = check_source(local(folder))
    assert error.what.startswith("1 tensors are not stored in a format of weights")
    assert error.where == f"{folder}: {name} is {dtype} in {shard.name}"
    assert error.do


def relabel(shard: Path, name: str, dtype: str) -> None:
    """Change a tensor's number format in the header only; the new name is as long as the old one."""
    content = shard.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length]
    spec = json.loads(header)[name]
    old, new = (json.dumps(spec | changed, separators=(",", ":")).encode() for changed in ({}, {"dtype": dtype}))
    assert old in header
    shard.write_bytes(
        content[:8]
        + header.replace(b'"%s":%s' % (name.encode(), old), b'"%s":%s' % (name.encode(), new))
        + content[8 + length :]
    )


def test_an_untied_model_needs_its_head(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    (error,) = check_source(local(folder))
    assert (error.what, error.where) == ("1 tensors are missing", "lm_head.weight")


def test_missing_shards_are_one_message(folder: Path) -> None:
    names = {f"model.layers.{layer}.x": f"shard-{layer:06}.safetensors" for layer in range(20_000)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (text,) = texts(folder)
    assert text.startswith("20,000 of 20,000 shards are missing: shard-000000.safetensors, shard-000001.safetensors,")
    assert len(text) < 500


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "a/b", "..", "", "a\0b"])
def test_shards_are_bare_names(folder: Path, name: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert "it names files outside its folder" in texts(folder)[0]


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_deep_json(folder: Path, file: str) -> None:
    (folder / file).write_text("[" * 200_000)
    assert "it is nested too deeply" in texts(folder)[0]


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors.index.json", "more.safetensors"])
def test_pipes_are_not_opened(folder: Path, file: str) -> None:
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)
    assert texts(folder)[0].startswith(f"{file}: a pipe, a socket or a device, and no file of a checkpoint\n")


def test_devices_are_not_read(folder: Path) -> None:
    (folder / "tokenizer.json").symlink_to("/dev/zero")
    assert texts(folder)[0].startswith("tokenizer.json: a pipe, a socket or a device")


def test_names_that_no_folder_has() -> None:
    assert "cannot be opened (File name too long)" in texts(Path("a" * 5000))[0]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_anywhere_in_the_config(folder: Path, number: str) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().rstrip().removesuffix("}") + f', "of_others": [{number}]}}')
    assert texts(folder)[0].startswith("config.json is no JSON: Out of range float values")


def test_a_shard_that_no_file_can_be_called(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(path.read_text().replace("model-00001", "\\ud800", 1))
    assert "unreadable shard index" in texts(folder)[0]
