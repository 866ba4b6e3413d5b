"""Memory, disk space and time that the stages of a run need: coarse, so that a change of a stage changes nothing here.

Times are those of a stage's last run on this machine with a model of about this size, by work: tokens × weights.
"""

import json
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path

from instruments.errors import ConfigError
from instruments.files import write_json
from models.config import is_on_host
from models.targets.config_json import count_dense
from pipeline.artifacts import UNREADABLE, artifact_folder
from pipeline.check import Checked
from pipeline.disk import BYTES, expected_bytes, free_bytes
from pipeline.settings import STAGES
from stages.artifacts.job import find_workers
from stages.artifacts.rendering import in_mib
from stages.calibration.token_memory import KEPT, free_memory, memory_limit
from stages.layers.config import LENGTH, TOKENS
from stages.text.config import sampled

PASSES = {"cluster", "assemble", "project", "evaluate"}  # go through the dense model one layer at a time
PROGRAM = 750 * 2**20  # bytes of host memory of a process with its libraries
# Until a stage was run here: seconds for libraries and files, and tokens × weights per second of two CPU cores.
START, GPU_SPEEDUP = 3.0, 30
SPEEDS = {"score": 1e9, "extract": 3e8, "assemble": 2e11, "project": 2e10, "train": 3e10}  # others 1e11
RATES = "rates.json"


def count_tokens(stage: str, checked: Checked) -> int:
    """Tokens that a stage reads, once for each model or method that reads them; 1 for a stage without text."""
    settings = checked.settings
    data, baselines = settings.data, settings.evaluate.baselines
    random = min(settings.vocabulary.tokens, data.tokens, checked.source.vocabulary)
    aligned = sum(name.endswith("_aligned") for name in baselines)
    counts = {
        "scan": sampled(data).tokens,
        **dict.fromkeys(("cluster", "assemble"), sampled(data).tokens + random),
        "project": data.tokens + random,
        "train": settings.train.tokens,
        "evaluate": data.heldout_tokens * (2 + len(baselines)) + data.tokens * aligned,
        "layers": TOKENS * (1 + 2 * checked.source.depth),
        "dump": settings.dump.steps * settings.dump.batch_tokens,
        "diagnose": settings.diagnose.tokens,
    }
    return counts.get(stage, 1)


def hidden_bytes(stage: str, checked: Checked) -> tuple[int, int]:
    """Bytes of hidden states that a stage keeps per process in memory, and of all processes on disk.

    KEPT (T, D) tensors of a process's own tokens; with several processes also two of all tokens.
    """
    if stage not in PASSES:
        return 0, 0
    workers, model = find_workers(), checked.settings.model
    vectors = count_tokens(stage, checked) * (KEPT / workers.world + 2 * (workers.world > 1))
    size = int(4 * vectors * checked.source.hidden)
    # is_on_host is asked last, since it may load torch.
    fits = size <= memory_limit(model, workers.local_world) or not is_on_host(model)
    return (size, 0) if fits else (0, size * workers.world)


def peak_bytes(stage: str, checked: Checked) -> int:
    """Bytes of memory per process at a stage's peak, on a GPU of the tensors alone; right within a factor of two."""
    settings, source, on_host = checked.settings, checked.source, is_on_host(checked.settings.model)
    hidden, width, layers, vocabulary = source.hidden, source.width, source.depth, source.vocabulary
    weights = count_dense(source).total
    dense = weights * BYTES.get(settings.model.dtype, 4 if on_host else 2)
    loaded = weights * 5 // 8 if settings.model.quantization in {"nf4", "fp4"} else dense
    carved = hidden * 3 * checked.shape.neurons(layers) if checked.shape else 0
    layer_pass = 8 * weights // layers + 10**5 * width + hidden_bytes(stage, checked)[0]  # with a batch's activations
    solve = 12 * width**2 + 16 * width * hidden  # of least squares, in fp64

    def saved(tokens: int, *, checkpointing: bool) -> int:
        """Bytes that layers and logits keep for the backward pass."""
        return 4 * tokens * ((16 * hidden + 8 * width) * (1 if checkpointing else layers) + 3 * vocabulary)

    def overlaps(steps: int) -> int:
        """Bytes of the products of all pairs of experts' outputs, twice: router descent joins their batches."""
        experts = checked.shape.experts if checked.shape and steps and settings.assemble.router == "error" else 0
        return 8 * settings.assemble.router_tokens * experts**2

    scan, train, project = settings.scan, settings.train, settings.project
    refits = project.router_steps * project.rounds * (project.alignment == "ridge")
    # Layer-wise descent on a GPU copies a layer's inputs and target outputs into one tensor each.
    copies = 0 if on_host or not project.descent_steps else 8 * count_tokens("project", checked) * hidden
    batch = scan.batch_size("cpu" if on_host else "cuda")
    # This process's experts, their momentum, and on the host the experts from before.
    gradients = dense + (12 if on_host else 8) * carved // find_workers().world
    gradients += saved(project.round_tokens, checkpointing=project.gradient_checkpointing)
    shares = find_workers().world if train.fsdp else 1
    # Weights, gradients and two moments; a teacher.
    training = 16 * max(weights, carved) // shares + dense * (train.logits > 0)
    training += saved(train.micro_batch * settings.data.max_length, checkpointing=train.gradient_checkpointing)
    needed = {
        "scan": loaded + saved(batch, checkpointing=scan.gradient_checkpointing),
        "cluster": layer_pass + 20 * settings.cluster.sample_tokens * width,
        "assemble": layer_pass
        + 12 * settings.assemble.router_tokens * width
        + max(solve, overlaps(settings.assemble.router_steps)),
        "project": max(layer_pass + max(solve, copies, overlaps(refits)), gradients * project.gradient_projection),
        "train": training,
        "evaluate": max(layer_pass, 2 * dense + 8 * settings.evaluate.batch_tokens * vocabulary),
        "layers": loaded + 16 * LENGTH * vocabulary,
        "dump": 2 * loaded,
        "diagnose": 2 * loaded * (settings.check == "auto_diff"),
    }
    return needed.get(stage, 0) + PROGRAM * on_host


def memory_warnings(checked: Checked, due: Sequence[str]) -> Iterator[str]:
    """A warning for each due stage with the model that needs more memory than is free, and settings that need less."""
    settings, due = checked.settings, [stage for stage in due if "model" in STAGES[stage].nodes]
    free, memory = free_memory(), "memory"
    if due and not is_on_host(settings.model):
        from instruments.device import free_device_memory  # noqa: PLC0415 - loads torch
        from models.loading import resolve_device  # noqa: PLC0415

        free, memory = free_device_memory(resolve_device(settings.model)), "GPU memory"
    less = {
        "scan": f"scan.batch_tokens={settings.data.max_length} scan.gradient_checkpointing=true",
        "project": "project.gradient_checkpointing=true, or project.gradient_projection=false",
        "train": "train.micro_batch=1 train.gradient_checkpointing=true, or train.fsdp=true with torchrun",
    }
    if settings.model.device_map != "none":  # the dense model is over all GPUs, memory and disk: these have one device
        due = [stage for stage in due if stage in {"cluster", "assemble", "train"}]
    for stage in due:
        if free is not None and (needed := peak_bytes(stage, checked)) > free:
            spilled = "model.hidden_memory=0GB or " * is_on_host(settings.model)
            tried = [less.get(stage, ""), f"{spilled}fewer data.tokens=" * (stage in PASSES)]
            do = ", or ".join([*filter(None, tried), f"a machine with {in_mib(needed)} of {memory}"])
            what = f"stage={stage} needs about {in_mib(needed)} of {memory}, {in_mib(free)} are free"
            yield f"{what}\n  do:    {do}, or a smaller model"


def room_errors(checked: Checked, due: Sequence[str]) -> Iterator[ConfigError]:
    """An error if results, and temporary files of the stage with the most, need more bytes than are free."""
    settings = checked.settings
    results = artifact_folder(Path(settings.output_dir), settings.model.label, "", "")  # may be on another disk
    written = sum(expected_bytes(stage, checked.source, checked.shape, settings.assemble) for stage in due)
    # Killed runs have written the temporary files of their stages before.
    begun = {folder.parents[1].name for folder in results.glob("*/.*/scratch")}
    temporary = {stage: 0 if stage in begun else temporary_bytes(stage, checked) for stage in due}
    stage = max(due, key=temporary.__getitem__, default="")
    needed, free = written + temporary.get(stage, 0), free_bytes(results)
    if needed > free:
        what = f"about {in_mib(needed)} will be written, {in_mib(free)} are free"
        where, do = f"{results}, stages {', '.join(due)}", "free some space, or output_dir= on a larger disk"
        if temporary[stage]:
            where += f"; {in_mib(temporary[stage])} of it are temporary, while stage={stage} runs"
            do += ", or fewer data.tokens=" * (hidden_bytes(stage, checked)[1] > 0)
        yield ConfigError(what, where=where, do=do)


def temporary_bytes(stage: str, checked: Checked) -> int:
    """Bytes on disk while a stage runs, in addition to its result: hidden states, and files to resume from, at most.

    Projection keeps aligned and projected layers. Training keeps two checkpoints of fp32 weights with two moments while
    a third is written.
    """
    form = checked.settings.assemble
    form = replace(form, dtype="float32") if stage == "train" else form
    times = {"project": 2, "train": 9}.get(stage, 0)
    return times * expected_bytes(stage, checked.source, checked.shape, form) + hidden_bytes(stage, checked)[1]


def estimate_seconds(stage: str, checked: Checked) -> float:
    """Seconds of a stage, at the speed of its last run on this machine, or at a default speed."""
    key, work = _find_work(stage, checked)
    speed = SPEEDS.get(stage, 1e11) * (1 if is_on_host(checked.settings.model) else GPU_SPEEDUP)
    return work / rate if (rate := _read_rates(checked).get(key)) else START + work / speed


def record_seconds(stage: str, checked: Checked, seconds: float) -> None:
    """Keep the speed of a run for `estimate_seconds`, in rates.json of the output folder."""
    key, work = _find_work(stage, checked)
    with suppress(OSError):  # a full disk: the run itself is complete
        write_json(Path(checked.settings.output_dir, RATES), {**_read_rates(checked), key: work / seconds})


def _find_work(stage: str, checked: Checked) -> tuple[str, float]:
    """Device, stage and decade of the weights, since small models do less work per second; the work of a process."""
    processes, weights = find_workers().world if STAGES[stage].shared else 1, count_dense(checked.source).total
    work = count_tokens(stage, checked) * weights / processes
    return f"{'cpu' if is_on_host(checked.settings.model) else 'cuda'} {stage} 1e{len(str(weights)) - 1}", work


def _read_rates(checked: Checked) -> dict[str, float]:
    """Key of `_find_work` → work per second of the last run; nothing from a file that is missing or damaged."""
    with suppress(*UNREADABLE):
        found = json.loads(Path(checked.settings.output_dir, RATES).read_text(encoding="utf-8"))
        return {key: float(rate) for key, rate in found.items() if 0 < float(rate) < inf}
    return {}


STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def start_measuring() -> None:
    """Free the memory of earlier stages and reset this process's peak."""
    from models.loading import keep_freed_memory, release_freed_memory  # noqa: PLC0415 - loads torch

    keep_freed_memory()
    release_freed_memory()
    with suppress(OSError):  # macOS has no such file: there the peak is that of the whole process
        CLEAR_REFS.write_text("5")


def measured_peak() -> int:
    """Highest resident memory of this process since `start_measuring`, in bytes."""
    if STATUS.exists():
        line = next(line for line in STATUS.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
