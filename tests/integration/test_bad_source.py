"""Checkpoints and text that cannot be carved: refused before weights are loaded, or before anything is published."""

import json
from operator import methodcaller

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.cli import run_command


@pytest.mark.usefixtures("without_weights")
def test_a_tokenizer_that_knows_no_token(failed, source):
    for path in source.glob("*token*"):
        path.unlink()
    assert failed(*words_for(source)).startswith("no usable tokenizer: it finds no token in plain text\n")


@pytest.mark.usefixtures("without_weights")
def test_a_text_column_missing_further_on(failed, tmp_path):
    path = tmp_path / "records.jsonl"
    records = ({"text" if number < 30 else "body": f"{number} words"} for number in range(40))
    path.write_text("\n".join(map(json.dumps, records)))
    assert f"\n  where: {path}:31; its columns: body\n" in failed("data=text", f"data.path={path}")


def test_weights_that_are_not_finite(failed, source, text):
    change_ffn(source, "up", lambda weight: weight.index_fill_(0, torch.tensor([3]), torch.nan))
    said = failed(*words_for(source, text))
    assert said.startswith("1 tensors hold weights that are not finite\n  where: model.layers.1.mlp.up_proj.weight\n")


def test_gradients_beyond_float32(failed, source, text):
    """The FFNs compute the same function."""
    change_ffn(source, "up", methodcaller("mul_", 1e-25))
    change_ffn(source, "down", methodcaller("mul_", 1e25))
    said = failed(*words_for(source, text))
    assert said.startswith(
        f"the gradients are not finite in 2 of 2 samples\n  where: 0: {text}:1, 1: {text}:1\n  do:    "
    )


def test_a_layer_that_gives_nothing_is_carved_all_the_same(source, text, tmp_path):
    """Layer pruning produces such FFNs."""
    for part in ("gate", "up", "down"):
        change_ffn(source, part, torch.Tensor.zero_)
    words = ["experts=4", "n=8", "cluster.map=none", "evaluate.speed_tokens=0", f"output_dir={tmp_path / 'outputs'}"]
    words += ["project.descent_steps=4", "assemble.router_tokens=256"]
    assert run_command([*words_for(source, text), *words]) == 0
    (record,) = tmp_path.glob("outputs/artifacts/local/evaluate/*/evaluation.json")
    live, dead = json.loads(record.read_text())["layers"]
    assert live["error"] > 0
    assert dead["error"] == 0


def words_for(source, text=None):
    words = ["model=local", f"model.path={source}"]
    if text is None:
        words.append("data=python_stdlib")
    else:
        words += ["data=text", f"data.path={text}", "data.heldout_share=0.3"]
        words += ["data.tokens=100", "data.heldout_tokens=50", "data.max_length=50"]
    return words


def change_ffn(folder, part, change):
    """Edit one FFN matrix of the last layer in its shard."""
    name = f"model.layers.1.mlp.{part}_proj.weight"
    path = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors = load_file(path)
    change(tensors[name])
    save_file(tensors, path, metadata={"format": "pt"})
