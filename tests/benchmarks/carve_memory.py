"""Peak memory of the stages that carve, beyond two layers and the hidden states, in matrices F × F of fp64.

One process runs the chain on a model of few wide layers with random weights, after a small one, so that libraries are
loaded. A stage's peak is the largest resident set (VmHWM, Linux) above the resident set before it, see peak_memory.py.
Left out are gradient projection, which holds the whole dense model, and stages that load it (scan, evaluate).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from benchmarks.peak_memory import MAPPED, REPOSITORY, peak_of_process
from benchmarks.rows import Row
from pico import write_pico

from pipeline.cli import run_command
from pipeline.run import Runner

LAYERS, HIDDEN, WIDTH, TOKENS = 2, 256, 6144, 2048  # L, D, F
EXPERTS, ALWAYS_ON = WIDTH * 3 // 4 // 64, WIDTH // 4  # the default shape: experts of 64, a quarter always on
SIZES = {
    "two layers": 2 * 4 * (3 * HIDDEN * WIDTH + 4 * HIDDEN**2),  # in fp32
    "hidden states": 3 * 4 * TOKENS * HIDDEN,  # with inputs and outputs of an FFN
    "a matrix F × F of fp64": 8 * WIDTH**2,
}
SHAPE = [f"experts={EXPERTS}", "n=64", f"top_k={EXPERTS // 3}", f"always_on={ALWAYS_ON}"]
QUICK = ["cluster.map=none", "vocabulary=none", "data.max_length=64", "evaluate.speed_tokens=0"]
PROJECT = ["stage=project", "project.gradient_projection=false", "project.descent_steps=4"]
# Stage → the most F × F, and what they are. The rest are activations, right-hand sides of solves and copies of columns.
COUNTED = {
    "cluster": (0.8, "0.5: regression of routed on always-on neurons"),
    "extract": (0.1, "0"),
    "assemble": (0.9, "0.5: regression of routed on always-on neurons"),
    "project": (1.8, "1.5: half of a second moment, a whole factor"),
}


def measure_carve() -> list[Row]:
    """A row for each stage, and the sizes behind it."""
    environment = os.environ | MAPPED | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])}
    command = [sys.executable, "-m", "benchmarks.carve_memory"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    peaks, (layers, hidden, square) = json.loads(done.stdout.splitlines()[-1]), SIZES.values()
    return [
        *(
            Row(f"{stage}'s peak beyond two layers and hidden states ÷ F × F of fp64",
                [(peaks[stage] - layers - hidden) / square], at_most=most, note=f"counted {counted}")
            for stage, (most, counted) in COUNTED.items()
        ),
        *(Row(f"  {name}", [size / 2**20], unit="MiB") for name, size in SIZES.items()),
    ]  # fmt: skip


def peaks_of_stages(folder: Path) -> dict[str, int]:
    """Stage → bytes."""
    text = folder / "text.txt"
    text.write_text("\n\n".join(f"{n} sparrows met {n * 7 % 31} finches near house {n % 9}." for n in range(900)))
    found: dict[str, int] = {}
    run_step = Runner.run_step

    def measured(runner: Runner, step: object) -> None:
        found[step.stage.name] = peak_of_process(lambda: run_step(runner, step))

    for name, sizes, shape in (
        ("small", {"hidden": 64, "intermediate": 256}, ["experts=3", "n=64", "top_k=1", "always_on=64"]),
        ("wide", {"hidden": HIDDEN, "intermediate": WIDTH}, SHAPE),
    ):
        model = write_pico(folder / name, "qwen3", layers=LAYERS, tokenizer=True, **sizes)
        words = ["model=local", f"model.path={model}", f"model.label={name}", "data=text", f"data.path={text}"]
        words += [f"data.tokens={TOKENS}", "data.heldout_share=0.1", "data.heldout_tokens=100"]
        with patch.object(Runner, "run_step", measured):
            assert run_command([*words, *shape, *QUICK, *PROJECT, f"output_dir={folder / 'outputs'}"]) == 0
    return {stage: peak for stage, peak in found.items() if stage in COUNTED}


if __name__ == "__main__":
    with TemporaryDirectory() as place:
        sys.stdout.write("\n" + json.dumps(peaks_of_stages(Path(place))))
