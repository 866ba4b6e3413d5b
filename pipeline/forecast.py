"""Estimates the cost of a run before it starts: the table of `plan=true`, and warnings of too little memory."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from models.config import PER_LAYER, is_on_host
from pipeline.cost import COSTS, draw
from pipeline.disk import in_mib, nearest_existing, scratch_bytes
from pipeline.plan import Step, lacks_pictures
from pipeline.report.words import duration
from pipeline.settings import Settings
from pipeline.validate import Checked
from pipeline.workload import Cost, sizes_of
from stages.artifacts.job import Table, find_workers
from stages.calibration.token_memory import free_memory

SECONDS = 0.6  # to measure each rate; all rates together take less than 5 s
ROWS = 4096  # tokens of a batch
# Numbers in a tensor that fits caches and gets memory used before, and in one that gets new pages from the system.
SMALL, LARGE = 2**18, 2**24
STARTING = 0.4  # seconds of a stage that no formula covers: text, files, publishing
DRAWING = 5.0  # seconds to compile UMAP's kernels before the first map
COMPILING = 10.0  # seconds to compile the kernels that numba keeps on disk for later runs
POINTS = 800.0  # neurons of a map per second


@dataclass(frozen=True)
class Rates:
    """Work per second of this machine: FLOPs, bytes, cells of an assignment problem."""

    products: float
    solves: float
    touched: float
    cells: float
    disk: float

    def seconds(self, cost: Cost) -> float:
        """Seconds of the work without any overlap."""
        parts = [
            cost.products / self.products, cost.solves / self.solves, cost.touched / self.touched,
            cost.cells / self.cells, (cost.read + cost.written) / self.disk,
        ]  # fmt: skip
        if cost.points:
            parts.append(DRAWING + COMPILING * (not has_kernels()) + cost.points / POINTS)
        return STARTING + sum(parts)


def has_kernels() -> bool:
    """Whether numba has kept kernels of UMAP's neighbour search, which the first import compiles."""
    kept, spec = "pynndescent*/*.nbi", find_spec("pynndescent")
    if named := os.environ.get("NUMBA_CACHE_DIR"):
        return any(Path(named).glob(kept))
    beside = Path(str(spec.origin)).parent.glob("__pycache__/*.nbi") if spec else ()
    return any(beside) or any((Path.home() / ".cache" / "numba").glob(kept))


def measure_rates(hidden: int, width: int, device_name: str, folder: Path) -> Rates:
    """Measure the machine's rates on operations of the model's D and F, at most 2,048 wide, in about 4 seconds.

    The fastest try counts; beside other programs, the plan's times are longer.
    """
    import numpy as np  # noqa: PLC0415 - slow to import, and needed only here
    import ot  # noqa: PLC0415
    import torch  # noqa: PLC0415

    from models.config import ModelConfig  # noqa: PLC0415
    from models.loading import resolve_device  # noqa: PLC0415

    device = resolve_device(ModelConfig(device=device_name))

    def clock() -> float:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    inner, width = min(hidden, 2048), min(width, 2048)
    x_TD, w_DF = torch.rand(ROWS, inner, device=device), torch.rand(inner, width, device=device)
    gram_FF = torch.eye(width, dtype=torch.float64, device=device) + 1 / width
    cost_UE = np.random.default_rng(0).random((512, 16))
    block = bytes(16 * 2**20)

    def touch(size: int) -> float:
        """Seconds for each byte that an activation and a product read or write."""
        a, b = torch.rand(2, size, device=device)
        return best_of(lambda: torch.nn.functional.silu(a) * b, clock) / (4 * 5 * size)

    def write() -> None:
        with (nearest_existing(folder) / f".speed-{time.time_ns()}").open("wb") as file:
            Path(file.name).unlink()
            file.write(sha256(block).digest() + block)  # files are hashed when written and before they are read

    return Rates(
        products=2 * ROWS * inner * width / best_of(lambda: x_TD @ w_DF, clock),
        solves=width**3 / 3 / best_of(lambda: torch.linalg.cholesky(gram_FF), clock),
        touched=2 / (touch(SMALL) + touch(LARGE)),  # stages do both
        cells=cost_UE.size / best_of(lambda: ot.emd(np.ones(512), np.full(16, 32.0), cost_UE), clock),
        disk=len(block) / best_of(write, clock),
    )


def best_of(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """Seconds of the fastest try within `SECONDS`; the first try is a warm-up."""
    work()
    end, best = time.perf_counter() + SECONDS, float("inf")
    while time.perf_counter() < end or best == float("inf"):
        start = clock()
        work()
        best = min(best, clock() - start)
    return best


def costs_of(steps: Sequence[Step], checked: Checked) -> dict[str, Cost]:
    """Due stage → cost, for stages with a formula (not diagnose). Libraries loaded by a stage stay in memory."""
    sizes, found, host = sizes_of(checked, on_host=is_on_host(checked.settings.model)), {}, 0
    for step in steps:
        if step.due and step.stage.name in COSTS:
            formula = draw if lacks_pictures(step) and not step.fresh else COSTS[step.stage.name]
            cost = formula(sizes, checked.settings)
            host = max(host, cost.host)
            found[step.stage.name] = replace(cost, host=host)
    return found


def forecast(checked: Checked, steps: Sequence[Step]) -> Table:
    """The table of `plan=true`, a row for each stage; kept results cost nothing."""
    settings, on_host = checked.settings, is_on_host(checked.settings.model)
    due = [step for step in steps if step.due]
    loading = {step.stage.name: seconds_to_import(f"stages.{step.stage.name}.stage") for step in due}
    rows, notes, total, costs = [], [], 0.0, costs_of(steps, checked)
    if due:
        hidden, device = int(checked.source["hidden_size"]), settings.model.device
        rates = measure_rates(hidden, checked.request.width, device, Path(settings.output_dir))
        notes = [*describe_rates(rates)]
    for step in steps:
        cost = costs.get(step.stage.name)
        if cost is None:
            rows.append([step.stage.name, *["-"] * 6, "kept" if not step.due else "unknown"])
            continue
        seconds = rates.seconds(cost) + loading[step.stage.name]
        total += seconds
        flops = (cost.products + cost.solves) / 1e12
        peak = cost.host + cost.device * on_host  # on a CPU tensors are in the process
        sums = [in_mib(size) for size in (cost.read, cost.written, cost.device, peak)]
        rows.append([step.stage.name, f"{cost.tokens:,}", f"{flops:,.3f}", *sums, duration(seconds)])
    columns = ("stage", "tokens", "TFLOP", "read", "written", "memory of tensors", "of the process", "time")
    notes += [f"all stages {duration(total)}, including library loading {duration(sum(loading.values()))}"]
    if "evaluate" in costs:
        shorter = [f"{words} {duration(rates.seconds(cost))}" for words, cost in fewer_baselines(checked)]
        notes += [f"evaluate with fewer baselines: {'; '.join(shorter)}"] * bool(shorter)
    notes += describe_temporary("hidden states above model.hidden_memory", {n: c.spilled for n, c in costs.items()})
    scratch = {name: scratch_bytes(name, checked.source, checked.shape, settings) for name in costs}
    notes += describe_temporary("files for resuming", scratch)
    return Table("plan", columns, rows, notes)


def seconds_to_import(name: str) -> float:
    """Processor time of importing a module; a stage's libraries count in the first stage that needs them."""
    start = time.process_time()
    import_module(name)
    return time.process_time() - start


def fewer_baselines(checked: Checked) -> Iterator[tuple[str, Cost]]:
    """Settings that shorten stage=evaluate, each with its cost: without aligned baselines, and without any."""
    settings, config = checked.settings, checked.settings.evaluate
    sizes = sizes_of(checked, on_host=is_on_host(settings.model))
    unaligned = [name for name in config.baselines if not name.endswith("_aligned")]
    for kept in (unaligned, []):
        if len(kept) < len(config.baselines) and settings.topology == PER_LAYER:  # a pool measures few
            fewer = replace(settings, evaluate=replace(config, baselines=kept))
            yield f"evaluate.baselines=[{','.join(kept)}]", COSTS["evaluate"](sizes, fewer)


def describe_temporary(what: str, sizes: Mapping[str, int]) -> Iterator[str]:
    """A note on the stages that keep temporary files; `sizes`: stage → bytes at its peak."""
    if found := [f"{in_mib(size)} in stage={name}" for name, size in sizes.items() if size]:
        yield f"{what}, temporarily on the disk of output_dir: {', '.join(found)}"


def describe_rates(rates: Rates) -> Iterator[str]:
    """Notes on the measured rates."""
    yield (
        f"measured here: products {rates.products / 1e9:,.0f} GFLOP/s, fp64 solves {rates.solves / 1e9:,.0f} "
        f"GFLOP/s, other operations {rates.touched / 1e9:,.1f} GB/s, disk {rates.disk / 1e9:,.1f} GB/s"
    )
    yield "an estimate: arithmetic and memory traffic at these rates, one process, without reading text"


def free_tensor_memory(settings: Settings) -> int | None:
    """Free bytes of the memory that holds the tensors, of the host or of the GPU; None if unknown."""
    if is_on_host(settings.model):
        return free_memory()
    import torch  # noqa: PLC0415 - slow to import

    from models.loading import resolve_device  # noqa: PLC0415

    return torch.cuda.mem_get_info(resolve_device(settings.model))[0]


def memory_warnings(checked: Checked, steps: Sequence[Step], free: int | None) -> list[str]:
    """A warning for each due stage with a peak above `free` bytes, see `peak_bytes_of`, and settings that would fit."""
    if free is None:
        return []
    found, memory = [], "memory" if is_on_host(checked.settings.model) else "GPU memory"
    for step in steps:
        needed = peak_bytes_of(step, checked, steps)
        if needed > free:
            tried = smaller_settings(step.stage.name, checked)
            fitting = (words for words, other in tried if peak_bytes_of(step, other, steps) <= free)
            do = next(fitting, None) or f"a machine with {in_mib(needed)} of {memory}, or a smaller model"
            what = f"stage={step.stage.name} needs about {in_mib(needed)} of {memory}, {in_mib(free)} are free"
            found.append(f"{what}\n  do:    {do}")
    return found


def peak_bytes_of(step: Step, checked: Checked, steps: Sequence[Step]) -> int:
    """Bytes of the tensors at the stage's peak, on a CPU with the rest of the process; 0 if unknown."""
    cost = costs_of(steps, checked).get(step.stage.name)
    return int(cost.device + cost.host * is_on_host(checked.settings.model)) if cost else 0


def smaller_settings(stage: str, checked: Checked) -> Iterator[tuple[str, Checked]]:
    """Settings that need less memory, as text and as settings, the smallest change first."""
    settings, least = checked.settings, checked.settings.data.max_length

    def change(group: str, **values: object) -> tuple[str, Checked]:
        texts = {key: str(value).lower() if isinstance(value, bool) else value for key, value in values.items()}
        node: Any = replace(getattr(settings, group), **values)
        changed = replace(checked, settings=replace(settings, **{group: node}))
        return " ".join(f"{group}.{key}={text}" for key, text in texts.items()), changed

    if stage == "scan":
        for count in halves(settings.scan.read_batch("cpu" if is_on_host(settings.model) else "cuda"), least):
            yield change("scan", batch_tokens=count)
        yield change("scan", batch_tokens=least, gradient_checkpointing=True)
    elif stage == "train":
        for count in halves(settings.train.micro_batch, 1):
            if not settings.train.batch % (count * find_workers().world):  # else the settings would be refused
                yield change("train", micro_batch=count, gradient_checkpointing=True)
    elif stage in {"cluster", "assemble", "project", "evaluate"}:
        yield change("model", hidden_memory="0GB")
        for count in halves(settings.data.tokens, max(2, least)):
            yield change("data", tokens=count)
    if stage == "project":
        yield change("project", gradient_projection=False)


def halves(count: int, least: int) -> Iterator[int]:
    """A half, a quarter ... of `count`, at least `least`."""
    while (count := count // 2) >= least:
        yield count
