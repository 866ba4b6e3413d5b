"""Huge sparse files are refused before they are read; lack of memory gives a clear message."""

import json
import resource
from math import prod
from pathlib import Path

import pytest
from integration.forked import start
from pico import change_config, write_pico

from pipeline.cli import run_command

GIANT = 64 * 2**30  # bytes; hashing them takes at least half a minute
SECONDS = 5  # of processor time until the refusal
SHAPE = ("experts=4", "n=8", "top_k=2", "always_on=8")
EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.fixture
def source(tmp_path):
    return write_pico(tmp_path / "pico", "qwen3", tokenizer=True)


def refusal(source, *words, memory=0):
    """Exit code, error text and processor seconds of a scan in so many bytes more than this process; 0: any number."""
    command = ["stage=scan", "model=local", f"model.path={source}", "data=python_stdlib", *SHAPE, "data.tokens=1000"]
    command += [f"output_dir={source.parent / 'outputs'}", *words]

    def run(command):
        if memory:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
        return run_command(command)

    said, before = source.parent / "said", resource.getrusage(resource.RUSAGE_CHILDREN)
    child = start(command, said, work=run)
    child.join(240)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "Traceback" not in said.read_text(), said.read_text()
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return child.exitcode, said.read_text(), seconds


def stretch(path, change):
    """Rewrite a shard with sparse zeros as data; `change(name, shape)` gives the new shape of a tensor."""
    data = path.read_bytes()
    length, end, header = int.from_bytes(data[:8], "little"), 0, {}
    for name, spec in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            shape = change(name, spec["shape"])
            size = prod(shape) * 4
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
            end += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    lengthen(path, 8 + len(text) + end)


def lengthen(path, size):
    with path.open("ab") as file:
        file.truncate(size)


@pytest.mark.parametrize("name", ["tokenizer.model", "chat_template.jinja"])
def test_giant_files_beside_the_weights(source, name):
    lengthen(source / name, GIANT)
    code, text, seconds = refusal(source)
    assert code != 0
    assert text.startswith(f"{name} has {(source / name).stat().st_size:,} bytes, more than the ")
    assert seconds < SECONDS


def test_giant_tensors_of_which_config_says_less(source):
    name = "model.layers.1.mlp.up_proj.weight"
    stretch(source / "model.safetensors", lambda found, shape: [GIANT // 96, 24] if found == name else shape)
    code, text, seconds = refusal(source)
    assert code != 0
    assert "1 tensors do not have the shape that config.json says" in text
    assert seconds < 2 * SECONDS  # what the model is made of is described first


def test_lack_of_memory(source):
    tokens = 5_000_000
    change_config(source, vocab_size=tokens)
    stretch(source / "model.safetensors", lambda name, shape: [tokens, shape[1]] if name in EMBEDDINGS else shape)
    code, text, _seconds = refusal(source, memory=8 * 2**30)
    what, where, do = text.splitlines()[-3:]
    assert code == 1
    assert what.startswith("out of memory: ")
    assert where == "  where: stage=scan; plan=true shows what it needs, and settings that need less"
    assert do.startswith("  do:    python -m pipeline stage=scan model=local ")
    assert do.endswith(" plan=true")
