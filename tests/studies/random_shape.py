"""Time the carve of a model of a 0.5B's or a 7B's shape with random weights, stage by stage: how fast is this machine?

PYTHONPATH=.:tests python -m studies.random_shape OUTPUT               # Qwen2.5-0.5B, half active, 81,920 tokens
PYTHONPATH=.:tests python -m studies.random_shape OUTPUT --size 7B     # 4 layers of Qwen2.5-7B, 65,536 tokens

With --profile FILE it also counts, on a GPU, kernels, waits of the host and seconds in which the GPU works. The text is
Python's standard library, the tokenizer the embedded model's. Losses of random weights mean nothing.
"""

import json
import shutil
import sys
import threading
import time
import traceback
from argparse import ArgumentParser
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.cli import run_command
from pipeline.run import Runner

REPOSITORY = Path(__file__).parents[2]
KEYS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
SIZES = {"0.5B": (24, 896, 4864, 14, 2), "7B": (4, 3584, 18944, 28, 4)}
CARVES = {
    "0.5B": ("experts=116", "n=32", "top_k=32", "always_on=1152", "data.tokens=81920"),
    "7B": ("experts=148", "n=96", "top_k=49", "always_on=4736", "data.tokens=65536"),
}
# Alignment and descent as for a real model (stages/README), without gradient projection.
METHOD = (
    *("data=python_stdlib", "data.max_length=512", "data.sample_tokens=12288", "cluster.map=none", "stage=project"),
    *("project.gradient_projection=false", "project.rounds=0", "project.penalties=[1.0]", "project.descent_steps=128"),
)


WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
STARTS = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")


def write_dense(folder: Path, size: str, layers: int, device: str) -> Path:
    """Write a Qwen2 of this size with random weights in bfloat16."""
    sizes = dict(zip(KEYS, (layers, *SIZES[size][1:]), strict=True))
    with torch.device(device):
        config = AutoConfig.for_model("qwen2", **sizes, vocab_size=151936, tie_word_embeddings=True)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for path in (REPOSITORY / "models/embedded").glob("*token*"):
        shutil.copyfile(path, folder / path.name)
    return folder


@contextmanager
def places():
    """Where the main thread is, 50 times a second: counts of `file:line` of this project's innermost frame."""
    found, over, main = Counter(), threading.Event(), threading.main_thread().ident

    def look():
        while not over.wait(0.02):
            own = [f for f in traceback.extract_stack(sys._current_frames()[main]) if str(REPOSITORY) in f.filename]
            found.update(f"{Path(f.filename).relative_to(REPOSITORY)}:{f.lineno} {f.name}" for f in own[-1:])

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def counted(run_step, found):
    """As `Runner.run_step`; appends the stage's seconds, kernels, waits and seconds in which the GPU works."""

    def run(runner, step):
        start = time.perf_counter()
        kind = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
        with profile(activities=[kind], acc_events=True) as recorded, places() as seen:
            run_step(runner, step)
        seconds = time.perf_counter() - start
        events = recorded.key_averages()
        count = lambda names: sum(event.count for event in events if event.key in names)  # noqa: E731
        longest = sorted(events, key=lambda event: -event.self_device_time_total)[:15]
        found.append(
            {
                "stage": step.stage.name,
                "seconds": seconds,
                "started": count(STARTS),
                "waits": count(WAITS),
                "busy": sum(event.self_device_time_total for event in events) / 1e6,
                "host": seen.most_common(25),
                "longest": [[event.key[:90], event.count, event.self_device_time_total / 1e6] for event in longest],
            }
        )

    return run


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--size", choices=SIZES, default="0.5B")
    parser.add_argument("--layers", type=int, help="default: 24 of a 0.5B, of which two stay dense; 4 of a 7B")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write what every stage does on the GPU, as JSON")
    parser.add_argument("--settings", nargs="*", default=[], help="more settings, as data.tokens=4096")
    wanted = parser.parse_args()
    layers = wanted.layers or SIZES[wanted.size][0]
    dense = write_dense(wanted.output / "dense", wanted.size, layers, wanted.device)
    place = (f"model.path={dense}", f"model.device={wanted.device}", f"output_dir={wanted.output}")
    kept = ("dense_layers=[0,-1]",) if wanted.size == "0.5B" and layers > 2 else ()
    words = ("model=local", "model.dtype=float32", *place, *CARVES[wanted.size], *kept, *METHOD, *wanted.settings)
    began, found = time.perf_counter(), []
    with patch.object(Runner, "run_step", counted(Runner.run_step, found) if wanted.profile else Runner.run_step):
        failed = run_command(list(words))
    seconds = time.perf_counter() - began
    if not failed:
        stages = json.loads((wanted.output / "latest/stages.json").read_text(encoding="utf-8"))["stages"]
        print(", ".join(f"{stage['stage']} {stage['seconds']:.1f}" for stage in stages), f"in all {seconds:.1f} s")  # noqa: T201
    if wanted.profile:
        wanted.profile.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return failed


if __name__ == "__main__":
    sys.exit(main())
