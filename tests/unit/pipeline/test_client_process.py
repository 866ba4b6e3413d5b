"""What clients are asked to do."""

import sys
from types import SimpleNamespace

from pipeline import client_process


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
