"""FFN inputs and outputs of a carved model with all experts on equal those of the dense model."""

import pytest
import torch
from numerics.emission_cases import CASES, write_case
from transformers import AutoModelForCausalLM

from models.ffn import watch_ffns


@torch.no_grad()
def seen_in(folder, ids):
    own = folder.name == "moe" and (folder / "modeling_tiny_onn.py").exists()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=own)
    found = {}
    with watch_ffns(model, lambda layer, x, y: found.update({layer: (x, y)})):
        model(ids)
    once = dict(found)
    model(ids.flip(0))
    assert found == once, "a hook was left behind"
    return found


@pytest.mark.parametrize("name", ["granite", "granite-shared", "phi3", "qwen2-always-on", "gemma2"])
def test_ffns_of_the_carved_model_are_those_of_the_dense(name, tmp_path):
    write_case(tmp_path, CASES[name])
    ids = torch.arange(14).view(2, 7)
    dense, carved = (seen_in(tmp_path / folder, ids) for folder in ("dense", "moe"))
    assert dense.keys() == carved.keys() == {0, 1}
    for layer, (x, y) in dense.items():
        torch.testing.assert_close(carved[layer][0], x, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(carved[layer][1], y, rtol=1e-4, atol=1e-4)
