"""Sources that cannot be carved are refused by their settings and headers, with all faults at once."""

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

from instruments.errors import CheckpointError, ConfigError, UserError
from models import check
from models.check import check_source
from models.config import ModelConfig, MoEShape
from models.emit import emit_checkpoint
from models.experts import ExpertWeights
from models.quantization import stored_quantization
from models.targets.config import MOE_TARGETS

INDEX = "model.safetensors.index.json"
NF4 = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
INT8 = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}}
GPTQ = {"quantization_config": {"quant_method": "gptq"}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pico(tmp_path_factory.mktemp("whole"), "qwen2", max_shard_size="12KB")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def faults(folder: Path, **settings: str) -> list[UserError]:
    return check_source(ModelConfig(kind="local", path=str(folder), **settings))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Edit a checkpoint's tensors and write them as one shard."""
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    (folder / INDEX).unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_whole_checkpoints_have_no_faults(folder: Path) -> None:
    assert len(list(folder.glob("*.safetensors"))) > 2
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}  # in old checkpoints
    change_tensors(folder, lambda tensors: tensors.update(buffer))
    assert faults(folder) == check_source(ModelConfig()) == []


def test_places_that_are_no_checkpoint(folder: Path, tmp_path: Path) -> None:
    for path, what, where in (
        (tmp_path / "gone", f"no checkpoint: {tmp_path / 'gone'} does not exist", "model.path"),
        (folder / "config.json", f"no checkpoint: {folder / 'config.json'} is a file, not a folder", "model.path"),
        (tmp_path, "no checkpoint: cannot read config.json (No such file or directory)", str(tmp_path)),
        (Path("a" * 5000), f"no checkpoint: {'a' * 5000} cannot be opened (File name too long)", "model.path"),
    ):
        (error,) = faults(path)
        assert (error.what, error.where) == (what, where)
        assert error.do == "model.path=<folder with config.json and model.safetensors>"
    (error,) = check_source(ModelConfig(kind="local"))
    assert isinstance(error, ConfigError)
    assert error.where == "model.path"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "config.json is no JSON"),
        ("[]", "config.json holds no object"),
        ("[" * 200_000, "config.json is no JSON: it is nested too deeply"),
    ],
)
def test_broken_config(folder: Path, text: str, reason: str) -> None:
    (folder / "config.json").write_text(text)
    (error,) = faults(folder)
    assert error.what.startswith(reason)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_anywhere_in_the_config(folder: Path, number: str) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().rstrip().removesuffix("}") + f', "of_others": [{number}]}}')
    assert faults(folder)[0].what.startswith("config.json is no JSON: Out of range float values")


def without_weights(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()


def test_pickles_are_refused_whether_or_not_there_is_other_code(folder: Path) -> None:
    without_weights(folder)
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    for name in names:
        (folder / name).write_bytes(b"never opened")
    assert [str(error) for error in faults(folder)] == [
        f"pickle checkpoint refused: {', '.join(names)} can run any code when opened\n"
        f"  where: {folder}\n"
        "  do:    give a safetensors checkpoint, or convert one you trust: "
        "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
    ]


@pytest.mark.parametrize(
    ("damage", "what", "do"),
    [
        (without_weights, "no model.safetensors or model.safetensors.index.json", "give a safetensors checkpoint"),
        (lambda folder: (folder / INDEX).unlink(), "no model.safetensors or", f"copy {INDEX} from the source of these"),
        (
            lambda folder: (folder / "adapter_config.json").write_text("{}"),
            "adapter_config.json beside the weights",
            "merge the adapter",
        ),
        (lambda folder: (folder / INDEX).write_text("{}"), "unreadable shard index (KeyError", "download or copy"),
        (lambda folder: (folder / INDEX).write_text("[" * 200_000), "unreadable shard index (ValueError", "download"),
        (lambda folder: edit_index(folder, "\ud800"), "unreadable shard index", "download"),
        *(
            (lambda folder, name=name: edit_index(folder, name), "unreadable shard index", "download")
            for name in ("../other.safetensors", "/etc/passwd", "a/b", "..", "", "a\0b")
        ),
    ],
)
def test_shards_that_cannot_be_found(folder: Path, damage: Callable[[Path], object], what: str, do: str) -> None:
    damage(folder)
    error = faults(folder)[0]
    assert isinstance(error, CheckpointError)
    assert error.what.startswith(what)
    assert error.do.startswith(do)


def edit_index(folder: Path, shard: str) -> None:
    """Put one more tensor into the index."""
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.extra.weight"] = shard
    (folder / INDEX).write_text(json.dumps(index))


def test_every_damaged_shard_is_named(folder: Path) -> None:
    missing, cut, corrupt = sorted(folder.glob("*.safetensors"))[:3]
    missing.unlink()
    cut.write_bytes(cut.read_bytes()[:-10])
    corrupt.write_bytes(b"\x40" + bytes(7) + b"\x00" * 200)
    assert [error.where for error in faults(folder)] == [str(missing), str(cut), str(corrupt)]


def test_index_and_shards_must_agree(folder: Path) -> None:
    edit_index(folder, next(folder.glob("*.safetensors")).name)
    (error,) = faults(folder)
    assert error.what.endswith("tensors are not in the shard the index names: model.extra.weight")
    assert error.where == str(folder / INDEX)


def test_missing_shards_are_one_message(folder: Path) -> None:
    names = {f"model.layers.{layer}.x": f"shard-{layer:06}.safetensors" for layer in range(20_000)}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    (error,) = faults(folder)
    assert error.what.startswith("20,000 of 20,000 shards are missing: shard-000000.safetensors,")
    assert len(str(error)) < 500


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", INDEX, "more.safetensors"])
def test_pipes_and_devices_are_not_read(folder: Path, file: str) -> None:
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)
    assert faults(folder)[0].what == f"{file}: a pipe, a socket or a device, and no file of a checkpoint"
    (folder / file).unlink()
    (folder / file).symlink_to("/dev/zero")
    assert faults(folder)[0].what == f"{file}: a pipe, a socket or a device, and no file of a checkpoint"


@pytest.mark.parametrize(
    ("model_type", "what"),
    [
        ("gpt2", "architecture 'gpt2' has no gated FFN"),
        ("bert", "architecture 'bert' is not supported"),
        (None, "architecture None is not supported"),
    ],
)
def test_other_architectures_and_damage_are_reported_together(folder: Path, model_type: str | None, what: str) -> None:
    edit_config(folder, model_type=model_type)
    next(folder.glob("*.safetensors")).unlink()
    architecture, _damage = faults(folder)
    assert architecture.what == what
    assert architecture.do.startswith("choose a dense model of one of these: gemma2, gemma3_text, granite, llama, ")


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
    assert [error.what for error in faults(tmp_path)] == ["architecture 'qwen2_moe' is not supported"]


@pytest.mark.parametrize(
    ("changes", "what", "where"),
    [
        ({"hidden_size": None, "vocab_size": "many"}, "config.json gives no number for hidden_size, vocab_size", ""),
        (GPTQ, "weights quantised by gptq cannot be sliced", "quantization_config in config.json"),
        ({"mlp_bias": True}, "an FFN with biases has no MoE counterpart", "mlp_bias in config.json"),
        *(
            ({key: value}, "with attention to later tokens this is no model of the next token", f"{key} in config.json")
            for key, value in (("is_causal", False), ("is_causal", None), ("use_bidirectional_attention", True))
        ),
        (
            {"dtype": None, "torch_dtype": "torch.float64"},
            "transformers' kernels for experts have no float64",
            "dtype in config.json",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4, "rope_type": "default"}}},
            "a position encoding of its own per layer has no MoE counterpart",
            "rope_parameters in config.json",
        ),
        (
            {"layer_types": ["full_attention"]},
            "layer_types names 1 layers, num_hidden_layers=2",
            "config.json",
        ),
        *(
            ({key: value}, "config.json holds values that no model has", f"{key}={value!r}")
            for key, value in (
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
            )
        ),
    ],
)
def test_configurations_that_cannot_be_carved(folder: Path, changes: dict[str, object], what: str, where: str) -> None:
    edit_config(folder, **changes)
    (error,) = faults(folder)
    assert (error.what, error.where) == (what, where)


def test_numbers_of_heads_that_do_not_fit(folder: Path) -> None:
    edit_config(folder, num_attention_heads=5)
    assert [error.what.split(",")[0] for error in faults(folder)] == [
        "hidden_size=24 is no multiple of num_attention_heads=5",
        "num_attention_heads=5 is no multiple of num_key_value_heads=2",
    ]


def test_ten_million_layers_are_compared_with_the_tensors_first(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=10**7, layer_types=None)
    began = time.monotonic()
    (error,) = faults(folder)
    assert time.monotonic() - began < 5
    assert error.what == "config.json says 10,000,000 layers, and the weights are 27 tensors in all"


def test_settings_and_source_are_checked_together(folder: Path) -> None:
    edit_config(folder, mlp_bias=True, quantization_config={"quant_method": "awq"})
    assert [error.what for error in faults(folder, device_map="auto", cpu_memory="lots")] == [
        "model.cpu_memory=lots is no amount of memory",
        "weights quantised by awq cannot be sliced",
        "an FFN with biases has no MoE counterpart",
    ]


@pytest.mark.parametrize(
    ("name", "change", "what"),
    [
        *(
            (name, lambda tensor: tensor[:-1].clone(), "1 tensors do not have the shape that config.json says")
            for name in (
                "model.layers.1.self_attn.q_proj.weight",
                "model.layers.1.self_attn.k_proj.bias",
                "model.layers.1.self_attn.o_proj.weight",
                "model.layers.1.input_layernorm.weight",
                "model.layers.0.mlp.down_proj.weight",
                "model.embed_tokens.weight",
                "model.norm.weight",
                "lm_head.weight",
            )
        ),
        ("lm_head.weight", None, "1 tensors are missing"),
        ("model.layers.1.mlp.gate_proj.weight", None, "1 tensors are missing"),
        ("adapter.0", lambda _none: torch.ones(2), "1 tensors are unknown to this architecture"),
    ],
)
def test_tensors_that_config_does_not_describe(
    folder: Path, name: str, change: Callable[[torch.Tensor | None], torch.Tensor] | None, what: str
) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        old = tensors.pop(name, None)
        if change is not None:
            tensors[name] = change(old)

    change_tensors(folder, edit)
    (error,) = faults(folder)
    assert error.what == what
    assert error.where.startswith(name)


@pytest.mark.parametrize("dtype", ["U32", "I32"])
@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"]
)
def test_weights_are_floating_point_numbers(folder: Path, name: str, dtype: str) -> None:
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
    ("config", "kind"),
    [
        ({}, None),
        ({"quantization_config": None}, None),
        (NF4, "nf4"),
        (INT8, "int8"),
        (GPTQ, "gptq"),
        ({"quantization_config": {"load_in_4bit": True}}, "fp4"),
        ({"quantization_config": {"bits": 3}}, "unknown"),
    ],
)
def test_how_a_checkpoint_is_stored(config: dict[str, object], kind: str | None) -> None:
    assert stored_quantization(config) == kind


@pytest.mark.parametrize(
    ("asked", "config", "allowed"),
    [
        *(("nf4", {}, True), ("int8", {}, True), ("none", NF4, True), ("nf4", NF4, True), ("none", INT8, True)),
        *(("int8", NF4, False), ("nf4", GPTQ, False)),
    ],
)
def test_quantisation_that_a_source_allows(asked: str, config: dict[str, object], allowed: bool) -> None:
    assert ([*check.check_quantization(ModelConfig(quantization=asked), config)] == []) is allowed


@pytest.mark.parametrize(
    ("settings", "config", "what"),
    [
        ({"quantization": "fp4"}, {}, "model.quantization=fp4 needs the package bitsandbytes"),
        ({}, INT8, "a checkpoint stored in int8 needs the package bitsandbytes"),
    ],
)
def test_without_bitsandbytes(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], config: dict[str, object], what: str
) -> None:
    monkeypatch.setattr(check, "find_spec", lambda _name: None)
    (error,) = check.check_quantization(ModelConfig(**settings), config)
    assert error.what == what
    assert [*check.check_quantization(ModelConfig(), {})] == []


@pytest.mark.parametrize(
    ("settings", "do"),
    [
        ({}, None),
        ({"kind": "hub", "name": "a/b", "revision": "v2"}, None),
        ({"kind": "local", "path": "/x"}, None),
        ({"name": "a/b", "revision": "v2"}, "model=hub model.name=a/b model.revision=v2"),
        ({"kind": "local", "path": "/x", "revision": "v2"}, "model.revision=null"),
        ({"kind": "hub", "name": "a/b", "path": "/my x"}, "model=local 'model.path=/my x'"),
    ],
)
def test_settings_of_another_kind_of_source_are_refused(settings: dict[str, str], do: str | None) -> None:
    assert [error.do for error in check.check_kind(ModelConfig(**settings))] == ([do] if do else [])


@pytest.mark.parametrize("amount", ["20GiB", "512 MB", "1.5GB", "60KB", "900kb"])
def test_amounts_of_memory(amount: str) -> None:
    model = ModelConfig(device_map="auto", gpu_memory=amount, cpu_memory=amount, hidden_memory=amount)
    assert list(check.check_placement(model)) == []


def test_limits_of_memory_that_are_none_or_without_effect() -> None:
    wrong = ModelConfig(device_map="auto", gpu_memory="20", cpu_memory="much", hidden_memory="half")
    assert [error.where for error in check.check_placement(wrong)] == [
        "model.gpu_memory",
        "model.cpu_memory",
        "model.hidden_memory",
    ]
    (error,) = check.check_placement(ModelConfig(cpu_memory="8GiB"))
    assert error.do == "model.device_map=auto model.cpu_memory=8GiB"
