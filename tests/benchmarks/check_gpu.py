"""`make check-gpu`: all checks that need a GPU, in one table that can be pasted into an issue.

The tests marked gpu; the chain on the embedded model in fp32, on the GPU and on the CPU; the benchmarks on that model
and on a 1.7B shape with random weights.
"""

import json
import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from benchmarks.workbench import SHAPES
from tabulate import tabulate

from instruments.errors import INVALID, ConfigError
from models.config import ModelConfig
from models.loading import resolve_device

REPOSITORY = Path(__file__).parents[2]
LOSSES = 2e-3  # nats: kernels sum in different orders, and a few tokens are routed to other experts
GROUPS = ("scan", "forward", "scanner", "memory", "moe", "dump", "watch")
Cells = tuple[str, str, str, str]


def main(words: Sequence[str] | None = None) -> int:
    """Returns 0 if all results are as they should be, 1 if one is not, 2 without a GPU."""
    options = read_options(words)
    try:
        device = resolve_device(ModelConfig(device=options.device))
    except ConfigError:
        sys.stderr.write(
            f"there is no GPU here: torch {torch.__version__} finds no device {options.device}\n"
            "  where: make check-gpu\n"
            "  do:    a machine with a CUDA device and a build of torch for it; make test needs none\n"
        )
        return INVALID
    rows: list[Cells] = []
    for part in (run_tests(), compare_chains(options.device, options.settings), run_benchmarks(options)):
        for cells in part:
            sys.stderr.write(f"{' | '.join(cells)}\n")
            rows.append(cells)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    table = tabulate(rows, ["what", "GPU", "CPU, or target", "as it should be"], "github", disable_numparse=True)
    sys.stdout.write(f"\n{name}, torch {torch.__version__}, {os.cpu_count()} CPU cores\n\n{table}\n")
    return int(any(cells[-1] == "no" for cells in rows))


def read_options(words: Sequence[str] | None) -> Namespace:
    """Parse the command line."""
    parser = ArgumentParser("check_gpu", description="Everything that needs a GPU, in one table.")
    parser.add_argument("--device", default="cuda", help="cuda (default), cuda:1 ...")
    parser.add_argument("--shapes", nargs="*", default=[*SHAPES], help="timed with random weights (default: all)")
    parser.add_argument("--groups", nargs="*", default=GROUPS, help=f"of the benchmarks (default: {' '.join(GROUPS)})")
    parser.add_argument("--settings", nargs="*", default=[], help="more settings of the chain, as debug=tiny")
    return parser.parse_args(words)


def run_tests() -> Iterator[Cells]:
    """The tests marked gpu. If none ran, they count as failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    sys.stderr.write(done.stdout[-4000:] if done.returncode else "")
    last = next(iter(reversed(done.stdout.strip().splitlines())), "nothing")
    yield "tests marked gpu", last.strip("= "), "all pass", _yes(done.returncode == 0 and "passed" in last)


def compare_chains(device: str, settings: Sequence[str]) -> Iterator[Cells]:
    """Time of every stage and loss of every model, on the device and on the CPU."""
    with TemporaryDirectory() as folder:
        here, cpu = (
            run_chain(place, Path(folder) / part, settings) for part, place in (("here", device), ("cpu", "cpu"))
        )
    if here is None or cpu is None:
        ends = ["ended with an error" if run is None else "done" for run in (here, cpu)]
        yield "chain on the embedded model", ends[0], ends[1], "no"
        return
    for stage, seconds in here[0].items():
        yield f"{stage}, embedded model", f"{seconds:.1f} s", f"{cpu[0][stage]:.1f} s", ""
    for model, loss in here[1].items():
        close = abs(loss - cpu[1][model]) <= LOSSES
        yield f"held-out loss of {model}", f"{loss:.4f}", f"{cpu[1][model]:.4f}", _yes(close)


def run_chain(device: str, outputs: Path, settings: Sequence[str]) -> tuple[dict[str, float], dict[str, float]] | None:
    """Seconds by stage and losses by model; None if the command failed."""
    words = ["model.device=" + device, "model.dtype=float32", "cluster.map=none", *settings, f"output_dir={outputs}"]
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *words], cwd=REPOSITORY, stdout=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        return None
    record = json.loads((outputs / "latest" / "stages.json").read_text(encoding="utf-8"))
    (evaluation,) = outputs.glob("artifacts/*/evaluate/*/evaluation.json")
    models = json.loads(evaluation.read_text(encoding="utf-8"))["models"]
    seconds = {stage["stage"]: stage["seconds"] for stage in record["stages"]}
    return seconds, {name: figures["loss"] for name, figures in models.items()}


def run_benchmarks(options: Namespace) -> Iterator[Cells]:
    """The benchmarks on the embedded model and on the shapes, with their targets."""
    for shape in [None, *options.shapes] if options.groups else []:
        given = ["--shape", shape, "--random"] if shape else []
        with TemporaryDirectory() as folder:
            found = Path(folder) / "rows.json"
            command = [sys.executable, "-m", "benchmarks", "--device", options.device, "--only", *options.groups]
            done = subprocess.run([*command, *given, "--json", str(found)], stdout=subprocess.DEVNULL, check=False)
            rows = json.loads(found.read_text(encoding="utf-8"))["rows"] if not done.returncode else []
        name = shape or "embedded model"
        if done.returncode:
            yield f"benchmarks, {name}", "ended with an error", "", "no"
        for row in rows:
            bounds = {"≤": row["at_most"], "≥": row["at_least"]}
            target = " ".join(f"{sign} {bound:g}" for sign, bound in bounds.items() if bound is not None)
            met = "" if row["met"] is None else _yes(row["met"])
            yield f"{row['what'].strip()}, {name}", f"{row['measured']:.3f} {row['unit']}".strip(), target, met


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


if __name__ == "__main__":
    sys.exit(main())
