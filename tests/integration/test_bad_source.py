"""Checkpoints that cannot be carved: refused by their headers if these show it, else before anything is published."""

import json
import shutil
from operator import methodcaller

import pytest
import torch
from integration.wording import message
from safetensors.torch import load_file, save_file

from pipeline.cli import run_command

SHARD = "model-0000{}-of-00003.safetensors"
FAMILIES = (
    "choose a dense model of one of these: "
    "gemma2, gemma3_text, granite, llama, mistral, olmo2, phi3, qwen2, qwen3, smollm3"
)
GIVE_FOLDER = "model.path=<folder with config.json and model.safetensors>"
RESTORE = "download or copy the file again"


def set_model_type(folder, model_type):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": model_type}))


def make_pickle(folder):
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"never opened")


@pytest.mark.parametrize(
    ("model_type", "what"),
    [("gpt2", "architecture 'gpt2' has no gated FFN"), ("mamba", "architecture 'mamba' is not supported")],
)
def test_architectures_that_cannot_be_carved(refused, source, model_type, what):
    set_model_type(source, model_type)
    assert refused(*words_for(source)) == message(what, "model_type in config.json", FAMILIES)


@pytest.mark.parametrize(
    ("damage", "what", "where"),
    [
        (shutil.rmtree, "no checkpoint: {} does not exist", "model.path"),
        (
            lambda folder: (folder / "config.json").unlink(),
            "no checkpoint: cannot read config.json (No such file or directory)",
            "{}",
        ),
    ],
)
def test_paths_that_are_no_checkpoint(refused, source, damage, what, where):
    damage(source)
    assert refused(*words_for(source)) == message(what.format(source), where.format(source), GIVE_FOLDER)


def test_damaged_shards_are_all_named(refused, source):
    corrupt, cut, lost = (source / SHARD.format(number) for number in (1, 2, 3))
    corrupt.write_bytes(b"\x40" + bytes(7) + bytes(200))
    whole = cut.stat().st_size
    cut.write_bytes(cut.read_bytes()[:-10])
    lost.unlink()
    reason = "unreadable header (JSONDecodeError: Expecting value: line 1 column 1 (char 0))"
    assert refused(*words_for(source)) == "\n".join(
        [
            message(f"{corrupt.name} is damaged: {reason}", corrupt, RESTORE),
            message(f"{cut.name} is damaged: truncated: {whole - 10} bytes, the header says {whole}", cut, RESTORE),
            message(f"{lost.name} is missing", lost, RESTORE),
        ]
    )


def test_pickles_are_refused(refused, source):
    make_pickle(source)
    assert refused(*words_for(source)) == message(
        "pickle checkpoint refused: pytorch_model.bin can run any code when opened",
        source,
        "give a safetensors checkpoint, or convert one you trust: "
        "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)",
    )


@pytest.mark.usefixtures("without_weights")
def test_a_tokenizer_that_knows_no_token(failed, source):
    for path in source.glob("*token*"):
        path.unlink()
    assert failed(*words_for(source)) == message(
        "no usable tokenizer: it finds no token in plain text",
        source,
        "put the model's tokenizer files beside its config.json",
    )


@pytest.mark.parametrize("option", ["default", "forward_only"])
def test_weights_that_are_not_finite(failed, source, text, option):
    change_ffn(source, "up", lambda weight: weight.index_fill_(0, torch.tensor([3]), torch.nan))
    assert failed(*words_for(source, text), f"scan={option}") == message(
        "1 tensors hold weights that are not finite",
        "model.layers.1.mlp.up_proj.weight",
        "download or copy the checkpoint again, or model.dtype=float32 if its numbers are too large for float16",
    )


def test_gradients_that_are_all_zero(failed, source, text):
    for layer in (0, 1):
        change_ffn(source, "down", torch.Tensor.zero_, layer)
        change_ffn(source, "up", torch.Tensor.zero_, layer)
    assert failed(*words_for(source, text)) == message(
        "all gradients are zero in 2 of 2 samples",
        f"0: {text}:1, 1: {text}:1",
        "check that the checkpoint's FFN weights are not all zero",
    )


def test_gradients_that_are_not_finite(failed, source, text):
    """Up scaled by 1e-25 and down by 1e25: the same function, with gradients beyond float32."""
    change_ffn(source, "up", methodcaller("mul_", 1e-25))
    change_ffn(source, "down", methodcaller("mul_", 1e25))
    assert failed(*words_for(source, text)) == message(
        "the gradients are not finite in 2 of 2 samples",
        f"0: {text}:1, 1: {text}:1",
        "model.dtype=float32; if it is, the checkpoint's weights are scaled beyond its range",
    )


def test_a_layer_that_gives_nothing_is_carved_all_the_same(source, text, tmp_path):
    """Layer pruning produces such FFNs."""
    for part in ("gate", "up", "down"):
        change_ffn(source, part, torch.Tensor.zero_)
    words = ["experts=4", "n=8", "cluster.map=none", "evaluate.speed_tokens=0", f"output_dir={tmp_path / 'outputs'}"]
    assert run_command([*words_for(source, text), *words]) == 0
    (record,) = tmp_path.glob("outputs/artifacts/local/evaluate/*/evaluation.json")
    live, dead = json.loads(record.read_text())["layers"]
    assert live["error"] > 0
    assert dead["error"] == 0


def words_for(source, text=None):
    words = ["model=local", f"model.path={source}"]
    if text is not None:
        words += ["data=text", f"data.path={text}", "data.heldout_share=0.3"]
        words += ["data.tokens=100", "data.heldout_tokens=50", "data.max_length=50"]
    return words


def change_ffn(folder, part, change, layer=1):
    """Edit one FFN matrix in its shard."""
    name = f"model.layers.{layer}.mlp.{part}_proj.weight"
    path = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors = load_file(path)
    change(tensors[name])
    save_file(tensors, path, metadata={"format": "pt"})
