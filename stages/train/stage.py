"""train: continued pretraining of the projected checkpoint; the result is a native checkpoint again."""

from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from models.config import ModelConfig
from models.families.fold import gate_fold
from models.families.moe import MOE_TARGETS, MoETarget
from models.loading import load_dense, load_tokenizer, resolve_device
from models.shape import Shape
from models.source import resolve_folder
from stages.contracts.job import Job, Table
from stages.contracts.routers import Routers
from stages.data.config import DataConfig
from stages.train.balance import Balance
from stages.train.checkpoint import load_trainable
from stages.train.config import TrainConfig
from stages.train.heldout import heldout_loss
from stages.train.phases import Phase, make_phases, total_steps
from stages.train.record import Record, read_record, tokens_at
from stages.train.report import summarise
from stages.train.result import keep_result
from stages.train.resume import drop_unfinished, find_latest, is_whole
from stages.train.run_phase import Course, run_phase
from stages.train.spread import make_schedule
from stages.train.teacher import Teacher
from stages.train.text import read_text


def run(job: Job, *, model: ModelConfig, data: DataConfig, train: TrainConfig, shape: Shape, seed: int) -> Table:
    """Write `checkpoint/`, the routers, `metrics.jsonl`, TensorBoard events and `loss.svg`.

    A killed run goes on from its last checkpoint; every process of torchrun takes part.
    """
    model = replace(model, device=job.workers.pick_device(model.device), quantization="none")
    source, checkpoint = resolve_folder(model), job.parents["project"] / "checkpoint"
    routers = Routers.load(job.parents["project"])
    text = read_text(data, train, load_tokenizer(source))
    phases = make_phases(train, train.batch * text.mean_length)
    done, teaches = steps_done(job, phases), bool(train.logits or train.hidden)
    # Needed by a teacher to the end, and by nobody else once the start has been measured.
    dense = load_dense(model, source) if teaches or not done else None
    course = Course(
        settings=train,
        text=text,
        schedule=make_schedule(routers.spread, train.spread, round(train.spread_share * total_steps(phases))),
        total=total_steps(phases),
        balance=balance_of(train, MOE_TARGETS[routers.target], shape),
        pooled=shape.pooled,
        teacher=Teacher(dense, train.hidden > 0) if teaches and dense is not None else None,
        heldout=lambda trained: heldout_loss(trained, text.heldout, job.workers, train.precision),
        seed=seed,
        workers=job.workers,
        device=resolve_device(model),
    )
    record = Record.open(job.scratch, done=done, tensorboard=train.tensorboard) if job.workers.leads else None
    if dense is not None and not done:
        measure_start(course, record, dense, checkpoint)
    del dense
    trained = run_phases(job.scratch, phases, course, record, checkpoint, done)
    if record is not None:
        record.close()
        keep_result(job, trained, routers, shape, course.schedule.at(course.total))
    job.workers.follow(None)  # nobody leaves before the result is kept
    return summarise(read_record(job.scratch), phases, text.tokens) if job.workers.leads else Table("", (), ())


def measure_start(course: Course, record: Record | None, dense: PreTrainedModel, checkpoint: Path) -> None:
    """The first line of the record: what is to be reached, and where it begins."""
    losses = {"dense_heldout_loss": course.heldout(dense)}
    losses["heldout_loss"] = course.heldout(load_trainable(checkpoint).to(course.device))
    if record is not None:
        record.write(0, "start", losses)


def run_phases(
    scratch: Path, phases: list[Phase], course: Course, record: Record | None, start: Path, done: int
) -> Path:
    """Every phase from the checkpoint that the one before it left; gives that of the last."""
    for phase in phases:
        folder = phase_folder(scratch, phase)
        if not is_whole(folder / "final"):
            seen = tokens_at(scratch, max(done, phase.first))
            run_phase(load_trainable(start), phase, course, folder, record, seen)
        start = folder / "final"
    return start


def balance_of(train: TrainConfig, target: MoETarget, shape: Shape) -> Balance:
    """What `auto` stands for: the selection bias where the architecture has one."""
    asked = train.balance
    if asked == "auto":
        asked = "loss" if target.selection_bias is None else "selection_bias"
    return Balance(asked, train.bias_rate * gate_fold(target, shape).selection_bias_scale)


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
