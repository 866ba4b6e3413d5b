"""A result is accepted only if it works in the number format in which it is written."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from instruments.errors import FAILED
from models.source import EMBEDDED
from pipeline.cli import run_command

SCALED = ("embed_tokens.weight", "o_proj.weight", "down_proj.weight")


@pytest.mark.slow
def test_a_checkpoint_that_overflows_is_not_published_and_the_remedy_works(tmp_path, capsys):
    """The embedded model with a residual stream 4,096 times as large: the same function, too large for float16."""
    folder, outputs = tmp_path / "model", tmp_path / "outputs"
    shutil.copytree(EMBEDDED, folder)
    tensors = load_file(folder / "model.safetensors")
    scaled = {name: tensor * 4096 if name.endswith(SCALED) else tensor for name, tensor in tensors.items()}
    scaled["model.norm.weight"] /= 4096  # the head is the embedding
    save_file(scaled, folder / "model.safetensors", metadata={"format": "pt"})
    loud = [
        "debug=tiny", "model=local", f"model.path={folder}", "model.label=loud", "data=python_stdlib",
        "cluster.map=none", f"output_dir={outputs}", "project.gradient_projection=false", "project.descent_steps=0",
    ]  # fmt: skip
    assert run_command([*loud, "stage=assemble", "assemble.dtype=float16"]) == FAILED
    error = capsys.readouterr().err
    assert "the checkpoint has a loss of nan in float16" in error
    assert "assemble.dtype=bfloat16" in error
    assert not any((outputs / "artifacts/loud").glob("assemble/[!.]*"))
    assert run_command([*loud, "stage=project", "assemble.dtype=bfloat16"]) == 0
    checkpoint = outputs / "latest/checkpoint/model.safetensors"
    assert {tensor.dtype for tensor in load_file(checkpoint).values()} >= {torch.bfloat16}
    assert any((outputs / "artifacts/loud").glob("assemble/[!.]*"))
