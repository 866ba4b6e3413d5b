import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pico import change_config, edited_tensors, write_pico
from transformers import AutoTokenizer, LlamaForCausalLM
from unit.pipeline.served_carves import write_wrapped_carve

import models.tiny_onn.register  # noqa: F401
from instruments.errors import CheckpointError, ConfigError, UserError
from models.config import ModelConfig
from models.emit import copy_tokenizer_files
from models.loading import (
    experts_argument,
    explained_memory,
    load_carved,
    load_dense,
    load_tokenizer,
    padding_id,
    resolve_device,
    resolve_dtype,
)
from models.source import EMBEDDED
from models.training import LARGE_PRODUCTS

CPU = torch.device("cpu")


def test_the_dense_model_is_frozen_and_in_evaluation_mode(tmp_path):
    folder = write_pico(tmp_path, "llama", dtype=torch.bfloat16)
    dense = load_dense(ModelConfig(device="cpu"), folder)
    assert not dense.training
    assert not any(parameter.requires_grad for parameter in dense.parameters())
    assert dense.config._attn_implementation == "sdpa"
    assert dense.dtype == torch.float32
    assert load_dense(ModelConfig(device="cpu", dtype="bfloat16"), folder).dtype == torch.bfloat16


def test_a_wrapper_that_computes_no_experts_leaves_the_choice_to_its_text_part(tmp_path):
    """Mistral 3: its class would refuse what the experts take."""
    moe = write_wrapped_carve(tmp_path, "mixtral", "mistral3_image", 0)
    carved = load_carved(moe, ModelConfig(device="cpu"), torch.float32, tmp_path / "offloaded")
    assert carved.config.text_config._experts_implementation == LARGE_PRODUCTS
    carved.set_experts_implementation(experts_argument(carved.config, "grouped_mm"))
    assert carved.config.text_config._experts_implementation == "grouped_mm"


def test_keys_of_a_familys_first_checkpoints_are_read(tmp_path):
    """EXAONE 3 names its layers as GPT-2 does."""
    folder = write_pico(tmp_path, "exaone", layers=3)
    config = json.loads((folder / "config.json").read_text())
    config["num_layers"] = config.pop("num_hidden_layers")
    (folder / "config.json").write_text(json.dumps(config))
    assert load_dense(ModelConfig(device="cpu"), folder).config.num_hidden_layers == 3


def test_auto_takes_float32_on_a_cpu_and_the_checkpoints_own_on_a_gpu():
    assert resolve_dtype(ModelConfig(), CPU) == torch.float32
    assert resolve_dtype(ModelConfig(), torch.device("cuda")) is None
    assert resolve_dtype(ModelConfig(dtype="float16"), CPU) == torch.float16


def test_devices_that_are_not_here(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device(ModelConfig(device="cuda:1")) == torch.device("cuda:1")
    with pytest.raises(ConfigError, match="device cuda:2 is not here") as caught:
        resolve_device(ModelConfig(device="cuda:2"))
    assert caught.value.where == "model.device"


def test_the_checkpoints_own_class_is_not_run(tmp_path, monkeypatch):
    """It may compute something else than transformers' class, by which other stages run the same layers."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = write_pico(tmp_path / "pico", "llama")
    (folder / "own.py").write_text("import transformers\n\nclass Own(transformers.LlamaForCausalLM): ...\n")
    change_config(folder, auto_map={"AutoModelForCausalLM": "own.Own"})
    model = ModelConfig(kind="local", path=str(folder), device="cpu", trust_remote_code=True)
    assert type(load_dense(model, folder)) is LlamaForCausalLM


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gemma3_text"])
def test_an_empty_tokenizer_is_none(tmp_path, family):
    """Without tokenizer files, transformers returns an empty one for Qwen; for Gemma, one that knows no word."""
    folder = write_pico(tmp_path, family)
    with pytest.raises(CheckpointError, match="no usable tokenizer: ") as caught:
        load_tokenizer(folder, trust_remote_code=False)
    assert caught.value.where == str(folder)


@pytest.mark.parametrize("parts", [(), ("text_config",), ("dense",), ("dense", "text_config")])
def test_the_tokenizer_of_another_model(tmp_path, parts):
    """By the vocabulary that config.json names: of a wrapper, or of TinyONN, in a part of it."""
    folder = write_pico(tmp_path, "qwen2", tokenizer=True)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 61}
    for part in reversed(parts):
        config = {"model_type": {"text_config": "llava", "dense": "tiny_onn"}[part], part: config}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="no usable tokenizer: it has 4096 tokens, the model 61"):
        load_tokenizer(folder, trust_remote_code=False)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"hidden_act": "nothing"}, "transformers cannot load this checkpoint: "),
        ({"num_hidden_layers": 10**7}, "config.json says num_hidden_layers=10000000, and the weights are "),
        ({"vocab_size": 10**9}, "config.json says a model of "),
        ({"model_type": "nothing"}, "transformers cannot load this checkpoint: "),
        ({"intermediate_size": 24}, ""),
        (None, "1 weights of the model are not in the checkpoint"),
    ],
)
def test_a_config_of_another_model(tmp_path, changes, what):
    folder = write_pico(tmp_path, "qwen2")
    change_config(folder, **(changes or {}))
    if changes is None:
        with edited_tensors(folder) as tensors:
            del tensors["model.layers.0.mlp.up_proj.weight"]
            tensors["spare"] = torch.zeros(5000)
    with pytest.raises(CheckpointError) as caught:
        load_dense(ModelConfig(kind="local", path=str(folder), device="cpu"), folder)
    assert caught.value.what.startswith(what)
    assert str(folder) in caught.value.where


def test_a_copied_tokenizer_is_spelled_for_transformers_4_and_5(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    copy_tokenizer_files(EMBEDDED, out)
    stored, copied = (json.loads((folder / "tokenizer_config.json").read_bytes()) for folder in (EMBEDDED, out))
    assert stored.pop("tokenizer_class") == "TokenizersBackend"
    assert copied.pop("tokenizer_class") == "PreTrainedTokenizerFast"
    special = ["<|user|>", "<|assistant|>"]
    assert copied.pop("additional_special_tokens") == stored.pop("extra_special_tokens") == special
    assert copied == stored
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (EMBEDDED, out)]
    text = "<|user|>\nprint(1)<|assistant|><|endoftext|>"
    ours = load_tokenizer(EMBEDDED, trust_remote_code=False)
    assert ours.decode(ours(text)["input_ids"]) == text
    assert tokenizers[0](text)["input_ids"] == tokenizers[1](text)["input_ids"]
    assert tokenizers[0].all_special_tokens == tokenizers[1].all_special_tokens


def test_files_of_a_tokenizer_that_are_read_are_copied_and_its_code_is_not(tmp_path, caplog):
    source, out = tmp_path / "source", tmp_path / "out"
    template = Path("additional_chat_templates/tool_use.jinja")
    (source / template).parent.mkdir(parents=True)
    out.mkdir()
    names = {"sentencepiece.bpe.model", "spiece.model", "tokenizer.json", "merges.txt", "chat_template.jinja", "NOTICE"}
    names |= {"tekken.json"}
    code = {"x.py", "tokenizer_x.py", "tokenizer.PKL", "LICENSE.so"}
    for name in (*names, *code, template, "notes.txt", "model.safetensors"):
        (source / name).write_text("{}")
    # Half a surrogate pair is valid JSON, but has no UTF-8.
    (source / "tokenizer_config.json").write_text(
        '{"pad_token": "\\ud800", "auto_map": {"AutoTokenizer": ["x.Y", null]}}'
    )
    copy_tokenizer_files(source, out)
    assert {path.name for path in out.iterdir()} == names | {template.parent.name, "tokenizer_config.json"}
    assert (out / template).exists()
    assert json.loads((out / "tokenizer_config.json").read_text()) == {"pad_token": "\ud800"}
    assert "auto_map of tokenizer_config.json is left out" in caplog.text


def test_padding_has_an_embedding(tmp_path, caplog):
    folder = write_pico(tmp_path / "pico", "llama", tokenizer=True)
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    known = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer.pad_token = None
    assert padding_id(tokenizer) == 0
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(7)
    assert padding_id(tokenizer) == 7
    assert caplog.messages == []
    tokenizer.add_special_tokens({"pad_token": "<pad beyond>"})
    assert tokenizer.pad_token_id >= known
    assert padding_id(tokenizer) == 0
    tokenizer.save_pretrained(folder)
    for _ in range(2):  # only the first load warns
        assert len(load_tokenizer(folder, trust_remote_code=False)) == known + 1
    assert caplog.messages == ["1 added tokens of the tokenizer have no embedding: text must not contain them"]


def test_a_real_allocation_that_cannot_be_met_and_other_errors():
    with pytest.raises(UserError, match="out of memory"), explained_memory("here", "lower it"):
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(UserError, match="out of memory: MemoryError"), explained_memory("here", "lower it"):
        bytearray(1 << 60)  # Python's error has no text
    with pytest.raises(RuntimeError, match="shapes"), explained_memory("here", "lower it"):
        raise RuntimeError("shapes do not match")


REUSE = """
import resource, torch
from models.loading import keep_freed_memory
keep_freed_memory()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(2**22) for _ in range(8)]  # 16 MiB each, 4,096 pages
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library is not glibc")
def test_freed_memory_is_used_again_without_asking_the_system():
    fresh = subprocess.run([sys.executable, "-c", REUSE], capture_output=True, text=True, check=True)
    assert int(fresh.stdout) < 4 * 4096
