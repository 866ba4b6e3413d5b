"""Generation that passes the length at which Phi-3's position encoding changes, with a cache."""

from pathlib import Path

import pytest
import torch
from numerics.emission_cases import LONGROPE, Case, write_case
from transformers import AutoModelForCausalLM

import models.tiny_onn.register  # noqa: F401 - from_pretrained is to know the class

PROMPT = torch.tensor([[3, 9, 14]])  # the encoding changes after 8 tokens


@torch.no_grad()
def generated_logits(folder: Path, **how: bool) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = model.generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=11, min_new_tokens=11, do_sample=False,
        output_logits=True, return_dict_in_generate=True, **how,
    )  # fmt: skip
    return torch.stack(found.logits)


@pytest.mark.parametrize(("target", "renews"), [("tiny_onn", True), ("mixtral", False), ("glm4_moe", False)])
def test_which_classes_compute_their_cache_again(tmp_path: Path, target: str, renews: bool) -> None:
    write_case(tmp_path, Case("phi3", target, pico=LONGROPE))
    wanted = generated_logits(tmp_path / "dense")
    torch.testing.assert_close(generated_logits(tmp_path / "moe", use_cache=False), wanted, rtol=0, atol=1e-4)
    error = (generated_logits(tmp_path / "moe") - wanted).abs().amax((1, 2))
    assert error[:6].max() < 1e-4
    assert (error[6:].max() < 1e-4) == renews, "the card and models/README.md name these classes"
