"""The plan of every preset, on a configuration of its model's sizes: no weights, a sensible shape and target."""

import json
import re
import time

import pytest
from config.preset_sizes import CONFIGS

from models.finding import find_decoder
from pipeline.cli import run_command
from pipeline.help import CONF

PRESETS = {
    path.stem: path.read_text().splitlines()[0]
    for path in (CONF / "model").glob("*.yaml")
    if " neurons; " in path.read_text().splitlines()[0]
}
# Numbers that the models' pages state, in billions; without heads for later tokens.
PUBLISHED = {
    "qwen1_5_4b": 3.95, "qwen2_5_0_5b": 0.49, "qwen3_0_6b": 0.60, "qwen3_1_7b": 1.72, "qwen3_4b_2507": 4.02,
    "qwen3_8b": 8.19, "qwen3_8_27b": 27.4, "llama3_2_1b": 1.24, "llama3_1_8b": 8.03, "ministral3_8b": 8.9,
    "gemma4_31b": 31, "lfm2_5_1_2b": 1.17,
}  # fmt: skip


def test_every_preset_has_sizes_here():
    assert {*PRESETS} == {*CONFIGS}


@pytest.mark.parametrize("preset", sorted(CONFIGS))
def test_the_plan_of_a_preset(preset, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "0123abc"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[preset]))
    (folder / "model.safetensors").touch()  # never opened
    monkeypatch.setattr("models.source.hf_hub_download", lambda *_args, **_more: str(folder / "config.json"))
    decoder = find_decoder(folder, weights=False)
    started = time.process_time()
    words = [f"model={preset}", "plan=true", "data=python_stdlib", f"output_dir={tmp_path / 'outputs'}"]
    assert run_command(words) == 0
    assert time.process_time() - started < 1
    said = capsys.readouterr().out
    layers, width, experts, n, top_k, always_on = map(int, re.findall(r" (\d+)(?=,| [a-z])", PRESETS[preset]))
    assert (decoder.depth, decoder.width) == (layers, width)
    shape = f"{layers} layers of {width} neurons -> {experts} experts of {n}, {top_k} per token, and {always_on} always"
    assert shape in said
    assert re.search(r"\b(49|50)% active", said)
    (serving,) = re.findall(r"serving +(\w+): transformers", said)
    assert serving != "TinyONNForCausalLM" or decoder.model_type in {
        "ministral3",
        "lfm2",
        "gemma4_text",
        "qwen3_5_text",
    }
    if preset in PUBLISHED:
        assert decoder.count(decoder.shapes) / 1e9 == pytest.approx(PUBLISHED[preset], rel=0.02)
