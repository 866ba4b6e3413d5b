"""The whole chain on a pico model of every family with special features: all experts on equals dense."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pico import write_pico

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
CAPS = {"final_logit_softcapping": 20.0, "attn_logit_softcapping": 10.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": WINDOWS | CAPS,
    "gemma3_text": WINDOWS | CAPS,
    "smollm3": {"no_rope_layers": [1, 0]},
    "olmo2": {},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    "phi3": {"sliding_window": 16},
}
WORDS = [
    "debug=tiny",
    "data.tokens=512",
    "data.heldout_tokens=256",
    "data.max_length=64",
    "experts=4",
    "n=8",
    "top_k=4",
    "always_on=8",
    "assemble.mode=parity",
    "assemble.parity_logit_std=0",
    "project=none",
]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_carve_with_all_experts_on_loses_nothing(model_type: str, tmp_path: Path) -> None:
    # Of transformers' MoEs, only mixtral supports phi3's window, and mixtral has no always-on neurons.
    own = ["assemble.target=tiny_onn"] if model_type == "phi3" else []
    dense = write_pico(tmp_path / "dense", model_type, intermediate=40, tokenizer=True, **FAMILIES[model_type])
    words = ["model=local", f"model.path={dense}", "model.label=pico", f"output_dir={tmp_path / 'out'}", *WORDS, *own]
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (found,) = (tmp_path / "out").glob("artifacts/pico/evaluate/*/evaluation.json")
    carved = json.loads(found.read_text(encoding="utf-8"))["models"]["carved"]
    assert abs(carved["gap"]) <= 1e-5
