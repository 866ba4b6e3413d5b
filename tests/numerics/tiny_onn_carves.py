"""TinyONN checkpoints of pico dense models, with tensors written by hand as the class documents them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from pico import write_pico
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from models.config import MoEShape
from models.finding import find_decoder
from models.targets.config import MOE_TARGETS
from models.targets.config_json import emit_config
from models.targets.tiny_onn import copy_code

LAYERS, HIDDEN = 3, 24
EXPERTS, N, ALWAYS_ON = 5, 8, 3


def write_carve(
    folder: Path, source: str, *, always_on: int = ALWAYS_ON, top_k: int = EXPERTS, tie: bool = False, **pico: Any
) -> Path:
    """Write `dense`, `moe` with zero routers, and the dense logits (`dense_logits.safetensors`) into `folder`."""
    width = EXPERTS * N + always_on
    dense = write_pico(folder / "dense", source, layers=LAYERS, hidden=HIDDEN, intermediate=width, tie=tie, **pico)
    ids = torch.arange(39).view(3, 13)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()(ids).logits
    assert logits.std() > 0.3
    save_file({"ids": ids, "logits": logits}, folder / "dense_logits.safetensors")
    tensors = load_file(dense / "model.safetensors")
    moe = {name: tensor for name, tensor in tensors.items() if ".mlp." not in name}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.mlp."
        ffn = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        order_F = torch.randperm(width, generator=torch.Generator().manual_seed(layer))
        moe |= {prefix + name: tensor for name, tensor in sparse_tensors(ffn, order_F, always_on).items()}
    save(folder / "moe", moe, dense, always_on=always_on, top_k=top_k, tie=tie)
    return folder


def sparse_tensors(ffn: dict[str, Tensor], order_F: Tensor, always_on: int) -> dict[str, Tensor]:
    """Make the tensors of one layer's sparse FFN."""
    if "gate_up_proj.weight" in ffn:
        gate_FD, up_FD = ffn["gate_up_proj.weight"].chunk(2)
    else:
        gate_FD, up_FD = ffn["gate_proj.weight"], ffn["up_proj.weight"]
    down_DF = ffn["down_proj.weight"]
    always_S, neurons_EN = order_F[:always_on], order_F[always_on:].view(EXPERTS, N)
    shared = {"gate_proj": gate_FD[always_S], "up_proj": up_FD[always_S], "down_proj": down_DF[:, always_S]}
    return {
        "gate.weight": torch.zeros(EXPERTS, HIDDEN),
        "gate.e_score_correction_bias": torch.zeros(EXPERTS),
        "experts.gate_up_proj": torch.cat([gate_FD[neurons_EN], up_FD[neurons_EN]], dim=1),
        "experts.down_proj": down_DF[:, neurons_EN].movedim(1, 0).contiguous(),
        **({f"shared_experts.{name}.weight": part.contiguous() for name, part in shared.items()} if always_on else {}),
    }


def save(folder: Path, moe: dict[str, Tensor], dense: Path, *, always_on: int, top_k: int, tie: bool) -> None:
    """Write weights, config.json and code."""
    folder.mkdir()
    save_file(moe, folder / "model.safetensors", metadata={"format": "pt"})
    shape = MoEShape(EXPERTS, N, top_k, always_on)
    keys = emit_config(find_decoder(dense), MOE_TARGETS["tiny_onn"], shape, "float32", tied=tie)
    keys["shared_intermediate_size"] = always_on  # without padding
    (folder / "config.json").write_text(json.dumps(keys))
    copy_code(folder)


def reload(cases: Path, **names: list[str]) -> dict[str, dict[str, dict[str, object]]]:
    """What the cases compute in a fresh process: registered or remote → case → findings."""
    script = Path(__file__).with_name("reload_tiny_onn.py")
    done = subprocess.run(
        [sys.executable, "-W", "error", script, cases, json.dumps(names)], capture_output=True, text=True, check=False,
        cwd=cases, env=os.environ | {"PYTHONPATH": "", "HF_MODULES_CACHE": str(cases / "modules")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {how: json.loads((cases / f"{how}.json").read_text()) for how in names}
