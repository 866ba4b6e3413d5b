"""Carves of dense pico models for the tests of clients, and a folder with Python that nobody may run."""

import shutil
from pathlib import Path
from typing import Any

import torch
from pico import change_config, write_pico
from zoo.checkpoints import write_checkpoint

from models.checkpoint.shards import DenseReader
from models.config import MoEShape
from models.emit import emit_checkpoint
from models.experts import slice_experts
from models.targets.config import MOE_TARGETS

# Stands for llama.cpp's package of the same name; of any file, it finds the same tensors.
GGUF = """from types import SimpleNamespace as Some
def tensor(name, weights, size):
    return Some(tensor_type=Some(name=name), n_elements=weights, n_bytes=size)
class GGUFReader:
    def __init__(self, file):
        self.tensors = [tensor("Q2_K", 256, 84), tensor("Q8_0", 64, 68), tensor("Q2_K", 512, 168)]
"""


def write_gguf_package(llama_cpp: Path) -> None:
    """Write it into a folder that stands for llama.cpp's."""
    (llama_cpp / "gguf-py").mkdir()
    (llama_cpp / "gguf-py/gguf.py").write_text(GGUF)


def write_carve(folder: Path, target: str, source: str, always_on: int, hidden: int = 64, **config: Any) -> Path:
    """Carve a dense pico model with four heads and a tokenizer; its routers are random. Returns the MoE's folder."""
    width = {} if source in {"qwen2", "granite"} else {"head_dim": hidden // 4}
    dense = write_pico(
        folder / "dense", source, hidden=hidden, intermediate=5 * 32 + always_on, tokenizer=True, **width, **config
    )
    return carve(dense, folder / "moe", target, MoEShape(5, 32, 2, always_on))


def write_wrapped_carve(folder: Path, target: str, source: str, always_on: int) -> Path:
    """Carve a model of the zoo that sees images. Returns the MoE's folder."""
    dense = write_checkpoint(source, folder / "dense")
    return carve(dense, folder / "moe", target, MoEShape(4, 24, 2, always_on))


def carve(dense: Path, moe: Path, target: str, shape: MoEShape) -> Path:
    """Write a carve with random routers."""
    always_on = shape.always_on
    with DenseReader(dense) as reader:
        hidden = reader.decoder.hidden
        order = torch.randperm(reader.decoder.width, generator=torch.Generator().manual_seed(0)).int()
        routed = order[always_on : always_on + shape.experts * shape.n].view(shape.experts, shape.n)
        emit_checkpoint(
            dense,
            moe,
            target=MOE_TARGETS[target],
            shape=shape,
            routers=lambda layer: (
                0.3 * torch.randn(shape.experts, hidden, generator=torch.Generator().manual_seed(layer))
            ),
            experts=lambda layer: slice_experts(reader.projections(layer), routed, order[:always_on]),
        )
    return moe


def make_hostile(checkpoint: Path, folder: Path, marker: Path) -> Path:
    """Copy a checkpoint; all its settings name Python beside it that writes `marker` when it is run."""
    shutil.copytree(checkpoint, folder)
    for name in ("evil.py", "tokenization_evil.py", "sub/__init__.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"open({str(marker)!r}, 'w').close()\nclass Evil: pass\n")
    change_config(folder, auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"})
    tokenizer = {"AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"]}
    change_config(folder, "tokenizer_config.json", auto_map=tokenizer, nested={"auto_map": tokenizer})
    return folder
