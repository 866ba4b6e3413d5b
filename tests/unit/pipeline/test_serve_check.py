"""Bounds on speed, the text of the comparison, and what clients are asked to do."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from pipeline import client_process, gguf, serve_check, serve_rows


def test_every_layer_reads_its_experts_of_a_pool(tmp_path):
    dense = {"model_type": "qwen3", "num_hidden_layers": 7}
    config = {"model_type": "tiny_onn", "topology": "global_pool", "num_experts": 5, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"dense_layers": [0], "dense": dense}))
    tensors = {
        "experts.gate_up_proj": (5, 6, 4),
        "experts.down_proj": (5, 4, 3),
        "model.layers.1.mlp.gate.weight": (5, 4),
    }
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, tmp_path / "model.safetensors")
    # Two of five experts of 3·3·4 weights in each of six layers, and a router of 20.
    assert dict(serve_rows._active(tmp_path))["prompt"] == pytest.approx(6 * 2 * 36 + 20)


def test_without_a_tokenizer_the_vocabulary_of_the_dense_model_gives_the_text(tmp_path, monkeypatch):
    config = {"model_type": "tiny_onn", "dense": {"model_type": "qwen3", "vocab_size": 11}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(serve_check, "run_client", lambda *_: {})
    check = serve_check._Check.of(serve_check._parser().parse_args([str(tmp_path)]))
    assert check.request["ids"][:3] == [0, 7, 3]


def test_bytes_of_a_gguf_file_are_those_that_a_token_reads(monkeypatch):
    def reader(file):
        fields = {"general.architecture": "qwen2moe", "qwen2moe.expert_count": 5, "qwen2moe.expert_used_count": 2}
        sizes = {"blk.0.ffn_up_exps.weight": 50, "blk.0.ffn_up_shexp.weight": 7, "token_embd.weight": 1000}
        if file == "moe":
            sizes["output.weight"] = 300
        else:
            fields = {"general.architecture": "qwen2"}
            del sizes["blk.0.ffn_up_exps.weight"]
        return SimpleNamespace(
            fields={name: SimpleNamespace(contents=lambda value=value: value) for name, value in fields.items()},
            tensors=[SimpleNamespace(name=name, n_bytes=size) for name, size in sizes.items()],
        )

    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "gguf", SimpleNamespace(GGUFReader=reader))
    # Two of five experts, the always-on ones, the head.
    assert client_process.active_bytes("llama.cpp", "moe") == {"bytes": 20 + 7 + 300}
    # No output head: the embedding is read as one.
    assert client_process.active_bytes("llama.cpp", "dense") == {"bytes": 7 + 1000}


def test_an_output_longer_than_the_prompt_repeats_its_tokens():
    decoded = []
    model = object.__new__(client_process._LlamaModel)
    model.context = lambda *, exact: exact
    model.api = SimpleNamespace(llama_memory_clear=lambda *_: None, llama_get_memory=lambda _: None)
    model.decode = lambda _context, ids, start: decoded.append((list(ids), start))
    _read, write = model.clocks([5, 6, 7], 4)
    write()
    assert decoded == [([5, 6, 7], 0), ([5], 3), ([6], 4), ([7], 5), ([5], 6)]


def test_a_client_that_the_system_kills_is_no_failure_of_its_last_line(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'Loading weights: 100%' >&2\nkill -9 $$\n")
    python.chmod(0o755)
    with pytest.raises(gguf.UserError) as caught:
        gguf.run_client(python, "transformers", {})
    assert caught.value.what == "transformers was killed, most likely for lack of memory"
