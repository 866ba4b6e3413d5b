"""`make check-gpu`: what a GPU does with this program, in some minutes, row by row.

The machine, and whether others use it; the tests marked gpu; the chain on the embedded model, against the losses in
chain_losses.json; two layers of a 0.5B's and of a 7B's shape through all stages; a training step, the scans and the MoE
of a 1.7B's shape. One process at a time, so that nothing runs beside what is timed.
"""

import json
import os
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tabulate import tabulate

from instruments.device import rounded_products
from instruments.errors import INVALID, ConfigError, first_line
from models.config import ModelConfig
from models.loading import resolve_device

REPOSITORY = Path(__file__).parents[2]
RECORDED = Path(__file__).with_name("chain_losses.json")
LOSSES = 2e-3  # nats: kernels sum in different orders, partitions differ, and the text is that of another Python
BUSY = 0.1  # load a core, and share of the GPU's memory, from which others disturb what is timed
GROUPS = ("scan", "scanner", "moe")
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
    parts: dict[str, Callable[[], Iterator[Cells]]] = {
        "machine": lambda: measure_machine(device),
        "tests": run_tests,
        "chain": lambda: run_chain(options.device, options.settings),
        "layers": lambda: carve_layers(options.device, options.keep),
        "benchmarks": lambda: run_benchmarks(options.device),
    }
    rows: list[Cells] = []
    for part in options.parts or parts:
        for cells in reported(part, parts[part]):
            sys.stderr.write(f"{' | '.join(cells)}\n")
            rows.append(cells)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    table = tabulate(rows, ["what", "measured", "target", "as it should be"], "github", disable_numparse=True)
    sys.stdout.write(f"\n{name}, torch {torch.__version__}, {os.cpu_count()} CPU cores\n\n{table}\n")
    return int(any(cells[-1] == "no" for cells in rows))


def reported(part: str, measure: Callable[[], Iterator[Cells]]) -> Iterator[Cells]:
    """The rows of a part; an error is one of them, so that those before and behind it are shown."""
    try:
        yield from measure()
    except Exception as error:  # noqa: BLE001 - whatever happens on a GPU
        yield part, f"ended with {type(error).__name__}: {first_line(error)}", "", "no"


def read_options(words: Sequence[str] | None) -> Namespace:
    """Parse the command line."""
    parser = ArgumentParser("check_gpu", description="Everything that needs a GPU, in one table.")
    parser.add_argument("--device", default="cuda", help="cuda (default), cuda:1 ...")
    parser.add_argument("--parts", nargs="*", default=[], help="machine tests chain layers benchmarks (default: all)")
    parser.add_argument("--settings", nargs="*", default=[], help="more settings of the chain, as debug=tiny")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what the stages do on the GPU, as JSON")
    return parser.parse_args(words)


def measure_machine(device: torch.device) -> Iterator[Cells]:
    """Whether others use it; time of an operator, products in four number formats, copies."""
    load = os.getloadavg()[0]
    yield "load average", f"{load:.1f}", f"< {BUSY * (os.cpu_count() or 1):.1f}", ""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        yield "memory of the GPU that others use", f"{1 - free / total:.1%}", f"< {BUSY:.0%}", ""
    one = torch.zeros(1, device=device)
    seconds = seconds_of(lambda: [one.add_(1) for _ in range(1000)], device)
    yield "an operator, of the host", f"{1000 * seconds:.1f} µs", "", ""
    size = 8192 if device.type == "cuda" else 512
    for name, dtype, rounded in (
        ("bf16", torch.bfloat16, False),
        ("TF32", torch.float32, True),
        ("fp32", torch.float32, False),
        ("fp64", torch.float64, False),
    ):
        left, right = torch.randn(2, size, size, device=device, dtype=dtype)
        with rounded_products(use=rounded):
            rate = 2 * size**3 / seconds_of(lambda left=left, right=right: left @ right, device)
        yield f"products in {name}", f"{rate / 1e12:.1f} TFLOP/s", "", ""
    there, here = torch.zeros(2**28, dtype=torch.uint8, device=device), torch.zeros(2**28, dtype=torch.uint8)
    here = here.pin_memory() if device.type == "cuda" else here
    yield "pinned memory to the GPU", f"{0.268 / seconds_of(lambda: there.copy_(here), device):.1f} GB/s", "", ""
    yield "GPU to pinned memory", f"{0.268 / seconds_of(lambda: here.copy_(there), device):.1f} GB/s", "", ""


def seconds_of(work: Callable[[], object], device: torch.device, rounds: int = 3) -> float:
    """The least of three, after a round that warms up."""
    found = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return min(found[1:])


def run_tests() -> Iterator[Cells]:
    """The tests marked gpu. If none ran, they count as failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files_of_tests()]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    sys.stderr.write(done.stdout[-4000:] if done.returncode else "")
    last = next(iter(reversed(done.stdout.strip().splitlines())), "nothing")
    yield "tests marked gpu", last.strip("= "), "all pass", _yes(done.returncode == 0 and "passed" in last)


def files_of_tests() -> list[str]:
    """The files with such a test: to collect all others takes half a minute."""
    files = (REPOSITORY / "tests").rglob("test_*.py")
    return [str(file) for file in files if "pytest.mark.gpu" in file.read_text(encoding="utf-8")]


def run_chain(device: str, settings: Sequence[str]) -> Iterator[Cells]:
    """Time of every stage on the embedded model, and the losses against those recorded on a CPU."""
    with TemporaryDirectory() as folder:
        words = ["model.device=" + device, "model.dtype=float32", "cluster.map=none", *settings, f"output_dir={folder}"]
        command = [sys.executable, "-m", "pipeline", *words]
        done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            yield "chain on the embedded model", "ended with an error", "", "no"
            return
        stages = json.loads((Path(folder) / "latest/stages.json").read_text(encoding="utf-8"))["stages"]
        (evaluation,) = Path(folder).glob("artifacts/*/evaluate/*/evaluation.json")
        models = json.loads(evaluation.read_text(encoding="utf-8"))["models"]
    for stage in stages:
        yield f"{stage['stage']}, embedded model", f"{stage['seconds']:.1f} s", "", ""
    for name, gap in json.loads(RECORDED.read_text(encoding="utf-8")).items():
        found = models[name]["gap"]
        yield f"gap of {name}, embedded model", f"{found:.4f}", f"{gap:.4f}", _yes(abs(found - gap) <= LOSSES)


def carve_layers(device: str, kept: Path | None) -> Iterator[Cells]:
    """Seconds a layer of every stage; how often the host starts a kernel or waits; the share in which the GPU works."""
    for size, target in (("0.5B", None), ("7B", 12.0)):
        with TemporaryDirectory() as folder:
            counts = (kept or Path(folder)).resolve() / f"layers_{size}.json"
            words = [folder, "--size", size, "--layers", "2", "--device", device, "--profile", str(counts)]
            command = [sys.executable, "-m", "studies.random_shape", *words]
            done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, check=False)
            if done.returncode:
                yield f"carve of two layers, {size}", "ended with an error", "", "no"
                continue
            stages = json.loads(counts.read_text(encoding="utf-8"))
        for stage in stages:
            said = f"{stage['seconds'] / 2:.2f} s, {stage['started'] / 2:,.0f} kernels, {stage['waits'] / 2:,.0f} waits"
            yield (
                f"{stage['stage']}, a layer of a {size}",
                f"{said}, GPU {stage['busy'] / stage['seconds']:.0%}",
                "",
                "",
            )
        whole = sum(stage["seconds"] for stage in stages) / 2
        met = "" if target is None else _yes(whole <= target)
        yield f"all stages, a layer of a {size}", f"{whole:.1f} s", f"≤ {target:g} s" if target else "", met


def run_benchmarks(device: str) -> Iterator[Cells]:
    """The benchmarks on a 1.7B's shape, with their targets; each group is a process, so that its rows come at once."""
    words = ["--device", device, "--shape", "qwen3-1.7b", "--random", "--repetitions", "3", "--active", "0.5"]
    for group in GROUPS:
        with TemporaryDirectory() as folder:
            found = Path(folder) / "rows.json"
            command = [sys.executable, "-m", "benchmarks", *words, "--only", group, "--json", str(found)]
            done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
            rows = json.loads(found.read_text(encoding="utf-8"))["rows"] if not done.returncode else []
        if done.returncode:
            yield f"benchmark {group}, 1.7B", "ended with an error", "", "no"
        for row in rows:
            bounds = {"≤": row["at_most"], "≥": row["at_least"]}
            target = " ".join(f"{sign} {bound:g}" for sign, bound in bounds.items() if bound is not None)
            met = "" if row["met"] is None else _yes(row["met"])
            yield f"{row['what'].strip()}, 1.7B", f"{row['measured']:.3f} {row['unit']}".strip(), target, met


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


if __name__ == "__main__":
    sys.exit(main())
