"""`pipeline.gguf`: refused inputs, remedies, and notes on differences between llama.cpp and the carve."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from pico import decoder_of
from unit.pipeline.served_carves import write_carve, write_gguf_package

from instruments.errors import ConfigError
from models.card import render_card
from models.config import MoEShape
from models.source import read_config
from models.targets.config import MOE_TARGETS
from models.targets.config_json import emit_config
from pipeline import gguf
from pipeline.clients import readable_copy
from pipeline.shape import ShapeRequest, describe_shape
from stages.assemble.config import AssembleConfig


@pytest.fixture(scope="module")
def carve(tmp_path_factory):
    return write_carve(tmp_path_factory.mktemp("carve"), "qwen3_moe", "qwen3", 0)


def run_gguf(capsys, *words):
    code = gguf.main([str(word) for word in words])
    return code, capsys.readouterr().err


def test_an_existing_file_is_kept(tmp_path, capsys, carve):
    (tmp_path / "x.gguf").write_text("precious")
    code, said = run_gguf(capsys, carve, tmp_path / "x.gguf")
    assert (code, said.splitlines()[0]) == (2, f"{tmp_path}/x.gguf exists already")
    assert (tmp_path / "x.gguf").read_text() == "precious"


def test_parts_of_llama_cpp_that_are_missing_or_too_old_are_named(tmp_path, capsys, carve, monkeypatch):
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    (old := tmp_path / "llama.cpp").mkdir()
    (old / "convert_hf_to_gguf.py").touch()
    for words, said in (
        ([], "converter is missing"),
        (["--llama-cpp", old], "a folder conversion"),
        (["--python", tmp_path / "none"], f"no interpreter: {tmp_path}/none\n"),
    ):
        code, found = run_gguf(capsys, carve, tmp_path / "x.gguf", *words)
        assert code == 2
        assert said in found
    assert not (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"model_type": "tiny_onn", "dense": {"model_type": "gemma2"}}, "knows no TinyONN"),
        ({"model_type": "qwen2_moe", "mlp_only_layers": [0, 23]}, "layers [0, 23]"),
        ({"model_type": "mixtral", "rope_parameters": {"rope_type": "longrope"}}, "no longrope position encoding"),
        ({"model_type": "mixtral", "hidden_act": "gelu"}, "only SiLU"),
        ({"model_type": "glm4_moe", "n_shared_experts": 1, "rope_parameters": {"rope_type": "llama3"}},
         "no llama3 position encoding"),
    ],
)  # fmt: skip
def test_targets_that_do_not_convert_are_refused(config, what):
    with pytest.raises(ConfigError, match=re.escape(what)):
        gguf.check_convertible(config)


@pytest.mark.parametrize(
    ("source", "target", "always_on", "dense_layers", "fault"),
    [
        ("cohere2", "cohere2_moe", 8, (0,), ""),
        ("cohere2", "cohere2_moe", 8, (1,), "runs dense layers only before all others"),
        ("ernie4_5", "ernie4_5_moe", 0, (0,), ""),
        ("ernie4_5", "ernie4_5_moe", 0, (2,), "runs dense layers only before all others"),
        ("ernie4_5", "ernie4_5_moe", 8, (0,), "has only shared experts as wide as a dense layer / key heads"),
        ("ernie4_5", "ernie4_5_moe", 8, (), ""),
        ("qwen3", "qwen3_moe", 0, (0, 2), "wants experts in every layer of this architecture, and layers [0, 2] have"),
        ("qwen3", "glm4_moe", 8, (0,), ""),
    ],
)
def test_plan_card_and_gguf_judge_alike(source, target, always_on, dense_layers, fault):
    dense, moe = decoder_of(source, num_hidden_layers=3), MOE_TARGETS[target]
    shape = MoEShape(2, 8, 2, always_on, dense_layers=dense_layers)
    said = gguf.llama_cpp_fault(emit_config(dense, moe, shape, "float32", tied=False))
    assert said.startswith(f"llama.cpp {fault}") if fault else not said
    card = render_card("x", moe, shape, {}, dense)
    assert said.replace("llama.cpp ", "- llama.cpp: ") in card
    assert ("`python -m pipeline gguf` converts it" in card) is not bool(said)
    request = ShapeRequest(2, 8, 2, always_on, 0.5, assemble=AssembleConfig(target=target), source=dense)
    serving = describe_shape(request, shape)[-1]
    assert ("not llama.cpp" in serving or serving.endswith("llama.cpp with always_on=0")) is bool(said)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"model_type": "mixtral", "sliding_window": 4096}, "Mixtral no sliding window: texts of up to 4,096"),
        (
            {"model_type": "glm4_moe", "rope_scaling": {"type": "dynamic"}},
            "Glm4Moe no dynamic position encoding: texts of up to 32,768",
        ),
    ],
)
def test_texts_that_are_too_long_for_llama_cpp_are_said(config, what):
    (note,) = gguf.check_convertible(config | {"max_position_embeddings": 32768})
    assert note.startswith(f"llama.cpp gives {what} tokens are right (-c ")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("nothing", "", "no checkpoint: cannot read config.json (No such file or directory)"),
        ("config.json", '{"model_type": ["qwen3_moe"]}', "['qwen3_moe'] is no architecture that a carve becomes"),
        ("config.json", '{"model_type": "qwen2"}', "qwen2 is no architecture that a carve becomes"),
        (
            "config.json",
            '{"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}}',
            "qwen3_5 with a text part of type qwen3_5_text is no architecture that a carve becomes",
        ),
        (
            "config.json",
            '{"model_type": "llava", "text_config": {"model_type": "mixtral"}}',
            "llava with a text part of type mixtral is no architecture that a carve becomes",
        ),
        ("config.json", '{"model_type": "qwen3_moe"}', "no model.safetensors or model.safetensors.index.json"),
    ],
)
def test_what_is_no_carve_is_refused(tmp_path, capsys, name, content, said):
    (tmp_path / name).write_text(content)
    code, found = run_gguf(capsys, tmp_path, tmp_path / "x.gguf")
    assert (code, found.splitlines()[0]) == (1, said)


def test_weights_without_a_tokenizer_are_refused(tmp_path, capsys, carve):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(carve / name)
    code, said = run_gguf(capsys, tmp_path, tmp_path / "x.gguf")
    assert (code, said.splitlines()[0]) == (1, "no tokenizer, which llama.cpp and serve_check need")


def test_the_converter_reads_a_tokenizer_that_transformers_5_wrote(tmp_path, carve, monkeypatch):
    moe = shutil.copytree(carve, tmp_path / "moe")
    (moe / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    seen = {}

    def run(_python, _step, request):
        seen.update(json.loads(Path(request["checkpoint"], "tokenizer_config.json").read_text()))
        Path(request["out"]).touch()

    monkeypatch.setattr(gguf, "run_client", run)
    monkeypatch.setattr(gguf, "_find_converter", lambda _clients: (tmp_path, Path("python")))
    gguf.write_gguf(moe, tmp_path / "x.gguf", "f16", gguf.Clients(None, ()))
    assert seen == {"tokenizer_class": "PreTrainedTokenizerFast"}
    assert {path.name for path in tmp_path.iterdir()} == {"moe", "x.gguf"}


def test_a_carve_of_ministral_3_is_converted_as_that_model(tmp_path):
    """As Mixtral, llama.cpp would ignore yarn's mscale, and how sharp attention is in long texts."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0}
    sharp = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "rope_theta": 1e4, "beta_slow": 1.0}
    moe = write_carve(tmp_path, "mixtral", "ministral3", 0, rope_parameters=rope | sharp)
    stored = read_config(moe)
    assert gguf.check_convertible(stored) == []
    with readable_copy(moe, respell=True) as seen:
        config = read_config(seen)
    assert (config["architectures"], config["model_type"]) == (["Ministral3ForCausalLM"], "ministral3")
    assert config["rope_scaling"] == config["rope_parameters"] == rope | sharp
    with readable_copy(moe) as seen:
        assert read_config(seen) == stored
    with pytest.raises(ConfigError, match="ignores the mscale"):
        gguf.check_convertible({key: value for key, value in stored.items() if key != "llama_4_scaling_beta"})


def test_bits_per_weight_are_those_of_the_types_in_the_file(tmp_path):
    """The quantiser takes another type for a tensor whose rows do not fit the one that was asked for."""
    write_gguf_package(tmp_path)
    (tmp_path / "conversion").mkdir()
    (tmp_path / "conversion/base.py").touch()
    clients = gguf.Clients(tmp_path, {Path(sys.executable): {"sentencepiece": "0.2"}})
    said = gguf.describe_types(tmp_path / "x.gguf", clients)
    assert said == "3.08 bits per weight; Q2_K 92.3%, Q8_0 7.7%"
