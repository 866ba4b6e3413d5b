"""Bounds on speed, and the text of the comparison, for checkpoints of the project's own class."""

import json

import pytest
import torch
from safetensors.torch import save_file

from pipeline import serve_check, serve_rows


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
