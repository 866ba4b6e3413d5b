"""Time the carve of a model of a 0.5B's or a 7B's shape with random weights, stage by stage: how fast is this machine?

python tests/studies/random_shape.py OUTPUT                  # 24 layers of Qwen2.5-0.5B, half active, 81,920 tokens
python tests/studies/random_shape.py OUTPUT --size 7B        # 4 layers of Qwen2.5-7B, half active, 65,536 tokens

The text is Python's standard library, the tokenizer the embedded model's. Losses of random weights mean nothing.
"""

import json
import shutil
import subprocess
import sys
import time
from argparse import ArgumentParser
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

REPOSITORY = Path(__file__).parents[2]
KEYS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
SIZES = {"0.5B": (24, 896, 4864, 14, 2), "7B": (4, 3584, 18944, 28, 4)}
CARVES = {
    "0.5B": ("experts=116", "n=32", "top_k=32", "always_on=1152", "dense_layers=[0,-1]", "data.tokens=81920"),
    "7B": ("experts=148", "n=96", "top_k=49", "always_on=4736", "data.tokens=65536"),
}
# Alignment and descent as for a real model (stages/README), without gradient projection.
METHOD = (
    *("data=python_stdlib", "data.max_length=512", "data.sample_tokens=12288", "cluster.map=none", "stage=project"),
    *("project.gradient_projection=false", "project.rounds=0", "project.penalties=[1.0]", "project.descent_steps=128"),
)


def write_dense(folder: Path, size: str, device: str) -> Path:
    """Write a Qwen2 of this size with random weights in bfloat16."""
    sizes = dict(zip(KEYS, SIZES[size], strict=True)) | {"vocab_size": 151936, "tie_word_embeddings": True}
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **sizes), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for path in (REPOSITORY / "models/embedded").glob("*token*"):
        shutil.copyfile(path, folder / path.name)
    return folder


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--size", choices=SIZES, default="0.5B")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    wanted = parser.parse_args()
    dense = write_dense(wanted.output / "dense", wanted.size, wanted.device)
    place = (f"model.path={dense}", f"model.device={wanted.device}", f"output_dir={wanted.output}")
    words = ("model=local", "model.dtype=float32", *place, *CARVES[wanted.size], *METHOD)
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "pipeline", *words], cwd=REPOSITORY, check=False)
    seconds = time.perf_counter() - began
    if not done.returncode:
        stages = json.loads((wanted.output / "latest/stages.json").read_text(encoding="utf-8"))["stages"]
        print(", ".join(f"{stage['stage']} {stage['seconds']:.1f}" for stage in stages), f"in all {seconds:.1f} s")  # noqa: T201
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
