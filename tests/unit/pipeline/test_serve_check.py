"""`serve_check`: the text of the comparison, verdicts; slow tests run the clients."""

import json
import os
from pathlib import Path

import pytest
from unit.pipeline.served_carves import write_carve

from models.loading import load_tokenizer
from models.source import read_config
from pipeline import clients, serve_check
from pipeline.serve_check import Row, render

# Targets that llama.cpp runs → source model type, always-on neurons.
SERVED = {
    "qwen2_moe": ("qwen2", 64), "qwen3_moe": ("qwen3", 0), "mixtral": ("llama", 0), "glm4_moe": ("qwen3", 64),
    "granitemoe": ("granite", 0), "granitemoeshared": ("granite", 64),
}  # fmt: skip


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


def test_the_table_has_a_row_a_runtime_and_names_what_is_missing():
    rows = [
        Row("a", "f32", 2.0, 0.0, 0.0, 1.0, True),
        Row("b", "q4_0", 2.5, 0.5, 0.75, 0.875, True),
        Row("c", "q8_0", fault="it fails"),
    ]
    lines = render(rows, {"vLLM": "pip install it"}).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:5]]
    assert cells[2] == ["a", "f32", "2.0000", "+0.0e+00", "0.0e+00", "100.0", "yes", "yes"]
    assert cells[4] == ["c", "q8_0", "–", "–", "–", "–", "", "NO: it fails"]
    assert lines[-1] == "vLLM not checked: pip install it"


def test_llama_cpp_without_its_converter_is_missing_and_not_wrong(carve, monkeypatch):
    answer = {"log_probabilities": [-1.5, -2.0], "best": [3, 4], "tokens": [1, 3, 4]}
    found = clients.Clients(None, {Path("python"): {"transformers": "5.23.0", "llama_cpp": "0.3.36"}})
    check = serve_check.Check(carve, read_config(carve), found, "", [1, 3, 4])
    monkeypatch.setattr(serve_check.Check, "_transformers", lambda *_: answer)
    assert [row.fault for row in check.rows(["f32"])] == ["", ""]
    assert check.missing().keys() == {"transformers 4.57", "llama.cpp", "vLLM"}


# Runtime → the variable with the interpreters that have it, joined by colons.
PYTHONS = {"llama.cpp": "LLAMA_PYTHON", "vLLM": "VLLM_PYTHON"}


@pytest.mark.slow
@pytest.mark.parametrize("target", [*SERVED, "tiny_onn"])
@pytest.mark.parametrize("runtime", PYTHONS)
def test_every_target_is_right(tmp_path, runtime, target):
    """llama.cpp also needs its source, in LLAMA_CPP; vLLM on a CPU does not support heads of size 16."""
    pythons = os.environ.get(PYTHONS[runtime], "").split(os.pathsep)
    if pythons == [""] or (runtime, target) == ("llama.cpp", "tiny_onn"):
        pytest.skip(f"{PYTHONS[runtime]} is not set, or llama.cpp does not know the class")
    more = {"tie": True} if runtime == "llama.cpp" else {"hidden": 128}
    moe = write_carve(tmp_path, target, *SERVED.get(target, ("smollm3", 64)), **more)
    words = [str(moe), "--types", "f32", *(word for python in pythons for word in ("--python", python))]
    serve_check.main([*words, "--json", str(tmp_path / "found.json")])
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    (row,) = [row for row in rows if row["runtime"].startswith(runtime)]
    assert row["right"], row["fault"]
    assert row["largest"] < 1e-4
    assert row["same_tokens"]


@pytest.mark.slow
def test_the_check_without_other_clients(carve, tmp_path, capsys):
    found = tmp_path / "found.json"
    assert serve_check.main([str(carve), "--json", str(found)]) == 0
    result = json.loads(found.read_text())
    assert [row["runtime"].partition(", ")[2] for row in result["rows"]][:2] == ["eager", "grouped_mm"]
    assert all(row["right"] and row["largest"] < 1e-4 for row in result["rows"])
    assert "transformers 4.57" in result["missing"]
    said = capsys.readouterr()
    assert "not checked: " in said.out
    assert [line.rpartition(", ")[2] for line in said.err.splitlines()][:2] == ["the reference", "f32"]


def test_the_text_of_the_comparison_has_its_tokens(carve):
    text, ids = serve_check.first_tokens(carve)
    assert load_tokenizer(carve, trust_remote_code=False)(text, add_special_tokens=False)["input_ids"] == ids
    assert 0.9 * serve_check.TOKENS < len(ids) <= serve_check.TOKENS
