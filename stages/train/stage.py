"""train: continued pretraining of the projected checkpoint; the result is a native checkpoint again."""

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import models.tiny_onn.register  # noqa: F401 - transformers then knows the project's own class
from models.card import copy_card
from models.config import ModelConfig, MoEShape
from models.emit import copy_tokenizer_files
from models.loading import load_dense, load_tokenizer, resolve_device
from models.routing import LinearRouter
from models.source import read_config, resolve_folder
from models.targets.base import MoETarget, gate_scale_of
from models.training import find_routers, selection_bias
from stages.artifacts.carve import Routers
from stages.artifacts.experts import CheckpointFormat, FormatSettings
from stages.artifacts.job import Job, Table
from stages.text.config import DataConfig
from stages.train.callbacks import drop_unfinished, find_latest, is_whole
from stages.train.config import TrainConfig
from stages.train.objective import Teacher
from stages.train.phases import Phase, make_phases, total_steps
from stages.train.record import EVENTS, FILE, Record, read_record, tokens_at
from stages.train.routers import Balance, make_schedule
from stages.train.run_phase import TrainContext, run_phase
from stages.train.text import heldout_loss, read_text


def load_trainable(folder: Path) -> PreTrainedModel:
    """The MoE in float32, with the kernels whose backward pass does not grow with the square of E."""
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, experts_implementation="grouped_mm"
    )
    return loaded


def write_native(model: PreTrainedModel, like: Path, folder: Path, dtype: torch.dtype) -> None:
    """Weights in `dtype` and in the names of `like`, with its config.json, tokenizer and code.

    transformers writes a config.json that version 4 of it misreads; that of `like` says the same to both.
    """
    model.to(dtype).save_pretrained(folder)
    for path in like.iterdir():
        if path.suffix in {".json", ".py"} and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    copy_tokenizer_files(like, folder)


Lines = Sequence[Mapping[str, Any]]
_COLUMNS = (
    "phase", "steps", "tokens", "held-out loss", "gap over dense", "perplexity over dense", "load max/mean",
    "dead experts", "router entropy", "tokens/s",
)  # fmt: skip


def summarise(lines: Lines, phases: Sequence[Phase], text_tokens: int) -> Table:
    """A row for the start and one for the end of every phase, of a training on a text of so many tokens."""
    dense = float(lines[0]["dense_heldout_loss"])
    parts = [("start", 0), *((phase.name, phase.steps) for phase in phases)]
    rows = [_row(name, steps, [line for line in lines if line["phase"] == name], dense) for name, steps in parts]
    gaps = [float(line["heldout_loss"]) - dense for line in lines if "heldout_loss" in line]
    seen = max(int(line.get("tokens", 0)) for line in lines)
    notes = [
        f"dense model: held-out loss {dense:.4f}; {text_tokens:,} tokens of text, read {seen / text_tokens:.1f} times"
    ]
    if gaps[0] > 0:
        notes.append(f"training closed {1 - gaps[-1] / gaps[0]:.0%} of the gap")
    return Table("continued pretraining", _COLUMNS, rows, notes)


def _row(name: str, steps: int, lines: Lines, dense: float) -> list[object]:
    last = {key: value for line in lines for key, value in line.items()}
    gap = float(last["heldout_loss"]) - dense
    speeds = [float(line["tokens_per_second"]) for line in lines if "tokens_per_second" in line]
    return [
        name,
        steps,
        int(last.get("tokens", 0)),
        f"{last['heldout_loss']:.4f}",
        f"{gap:+.4f}",
        f"{math.expm1(gap):+.1%}",
        f"{last['load_max_over_mean']:.2f}" if "load_max_over_mean" in last else "-",
        last.get("dead_experts", "-"),
        f"{last['router_entropy']:.3f}" if "router_entropy" in last else "-",
        f"{sum(speeds) / len(speeds):,.0f}" if speeds else "-",
    ]


def describe(lines: Lines) -> str:
    """The training in a sentence, for the model card."""
    dense, start = (float(lines[0][name]) for name in ("dense_heldout_loss", "heldout_loss"))
    tokens = max((int(line["tokens"]) for line in lines if "tokens" in line), default=0)
    end = next(float(line["heldout_loss"]) for line in reversed(lines) if "heldout_loss" in line)
    return (
        f"{tokens:,} tokens; held-out loss over the dense model's {start - dense:+.4f} before, {end - dense:+.4f} after"
    )


def keep_result(job: Job, trained: Path, form: CheckpointFormat, logit_std: float) -> None:
    """Write everything that is published.

    Args:
        job: whose `out` it goes to.
        trained: checkpoint of the last phase.
        form: of the checkpoint.
        logit_std: of the router logits in the end, as scheduled.
    """
    start, model = job.parents["project"] / "checkpoint", load_trainable(trained)
    write_native(model, start, job.out / "checkpoint", form.dtype)
    copy_card(start, job.out / "checkpoint", describe(read_record(job.scratch)))
    scale = gate_scale_of(form.target, form.shape).selection_bias_scale
    found = [read_router(router, scale) for router in find_routers(model)]
    Routers.of(found, form.dtype, logit_std).save(job.out)
    shutil.copyfile(job.scratch / FILE, job.out / FILE)
    if (job.scratch / EVENTS).exists():
        shutil.copytree(job.scratch / EVENTS, job.out / EVENTS)


def read_router(router: nn.Module, bias_scale: float) -> LinearRouter:
    """Rows and bias of a router, the bias in the unit of its logits."""
    bias_E = selection_bias(router)
    weight: Tensor = router.weight  # type: ignore[assignment]
    rows_ED = weight.detach().float()
    return LinearRouter.without_bias(rows_ED) if bias_E is None else LinearRouter(rows_ED, bias_E.float() / bias_scale)


def run(
    job: Job,
    *,
    model: ModelConfig,
    data: DataConfig,
    assemble: FormatSettings,
    train: TrainConfig,
    shape: MoEShape,
    seed: int,
) -> Table:
    """Write `checkpoint/`, the routers, `metrics.jsonl` and TensorBoard events.

    A killed run goes on from its last checkpoint; every process of torchrun takes part.
    """
    model = replace(model, device=job.workers.pick_device(model.device), quantization="none")
    source, checkpoint = resolve_folder(model), job.parents["project"] / "checkpoint"
    routers = Routers.load(job.parents["project"])
    form = CheckpointFormat.of(source, read_config(source), assemble, shape)
    text = read_text(data, train, load_tokenizer(source))
    phases = make_phases(train, train.batch * text.mean_length)
    done, teaches = steps_done(job, phases), bool(train.logits or train.hidden)
    # Needed by a teacher to the end, and by nobody else once the start has been measured.
    dense = load_dense(model, source) if teaches or not done else None
    context = TrainContext(
        settings=train,
        text=text,
        schedule=make_schedule(routers.logit_std, train.logit_std, round(train.logit_std_share * total_steps(phases))),
        total=total_steps(phases),
        balance=balance_of(train, form.target, shape),
        pooled=shape.pooled,
        teacher=Teacher(dense, train.hidden > 0) if teaches and dense is not None else None,
        heldout=lambda trained: heldout_loss(trained, text.heldout, job.workers, train.precision),
        seed=seed,
        workers=job.workers,
        device=resolve_device(model),
    )
    record = Record.open(job.scratch, done=done, tensorboard=train.tensorboard) if job.workers.leads else None
    if dense is not None and not done:
        measure_start(context, record, dense, checkpoint)
    del dense
    trained = run_phases(job.scratch, phases, context, record, checkpoint, done)
    if record is not None:
        record.close()
        keep_result(job, trained, form, context.schedule.at(context.total))
    job.workers.follow(None)  # nobody leaves before the result is kept
    return summarise(read_record(job.scratch), phases, text.tokens) if job.workers.leads else Table("", (), ())


def measure_start(context: TrainContext, record: Record | None, dense: PreTrainedModel, checkpoint: Path) -> None:
    """The first line of the record: what is to be reached, and where it begins."""
    losses = {"dense_heldout_loss": context.heldout(dense)}
    losses["heldout_loss"] = context.heldout(load_trainable(checkpoint).to(context.device))
    if record is not None:
        record.write(0, "start", losses)


def run_phases(
    scratch: Path, phases: list[Phase], context: TrainContext, record: Record | None, start: Path, done: int
) -> Path:
    """Every phase from the checkpoint that the one before it left; gives that of the last."""
    for phase in phases:
        folder = phase_folder(scratch, phase)
        if not is_whole(folder / "final"):
            seen = tokens_at(scratch, max(done, phase.first))
            run_phase(load_trainable(start), phase, context, folder, record, seen)
        start = folder / "final"
    return start


def balance_of(train: TrainConfig, target: MoETarget, shape: MoEShape) -> Balance:
    """What `auto` stands for: the selection bias where the architecture has one."""
    asked = train.balance
    if asked == "auto":
        asked = "loss" if target.selection_bias is None else "selection_bias"
    return Balance(asked, train.bias_rate * gate_scale_of(target, shape).selection_bias_scale)


def steps_done(job: Job, phases: list[Phase]) -> int:
    """Steps that a killed run left; what it left half written is removed."""
    done = 0
    for phase in phases:
        folder = phase_folder(job.scratch, phase)
        if is_whole(folder / "final"):
            done = phase.last
            continue
        if job.workers.leads:
            drop_unfinished(folder)
        found = find_latest(folder)
        done = phase.first + found[1] if found else done
        break
    agreed: int = job.workers.follow(done)
    return agreed


def phase_folder(scratch: Path, phase: Phase) -> Path:
    """Where a phase keeps its checkpoints."""
    return scratch / phase.name
