"""train: continued pretraining of the projected checkpoint; the result is a native checkpoint again."""

from dataclasses import replace
from pathlib import Path

from models.config import ModelConfig
from models.families.moe import MOE_TARGETS
from models.loading import load_dense, load_tokenizer, resolve_device
from models.shape import Shape
from models.source import read_config, resolve_folder
from stages.contracts.job import Job, Table
from stages.contracts.routers import Routers
from stages.data.config import DataConfig
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
    source, start = resolve_folder(model), job.parents["project"] / "checkpoint"
    routers = Routers.load(job.parents["project"])
    text = read_text(data, train, load_tokenizer(source))
    phases = make_phases(train, train.batch * text.mean_length)
    total = total_steps(phases)
    dense = load_dense(model, source)
    course = Course(
        settings=train,
        text=text,
        schedule=make_schedule(routers.spread, train.spread, round(train.spread_share * total)),
        total=total,
        balance=kind_of_balance(train.balance, biased=MOE_TARGETS[routers.target].selection_bias is not None),
        pooled=read_config(start).get("topology") == "global_pool",
        teacher=Teacher(dense, train.hidden > 0) if train.logits or train.hidden else None,
        heldout=lambda trained: heldout_loss(trained, text.heldout, job.workers, train.precision),
        seed=seed,
        workers=job.workers,
        device=resolve_device(model),
    )
    done = steps_done(job, phases)
    record = Record.open(job.scratch, done=done, tensorboard=train.tensorboard) if job.workers.leads else None
    if not done:
        losses = {"dense_heldout_loss": course.heldout(dense)}
        losses["heldout_loss"] = course.heldout(load_trainable(start).to(course.device))
        if record is not None:
            record.write(0, "start", losses)
    del dense
    for phase in phases:
        folder = phase_folder(job.scratch, phase)
        if not is_whole(folder / "final"):
            run_phase(
                load_trainable(start), phase, course, folder, record, tokens_at(job.scratch, max(done, phase.first))
            )
        start = folder / "final"
    if record is not None:
        record.close()
        keep_result(job, start, routers, shape, course.schedule.at(total))
    job.workers.follow(None)  # nobody leaves before the result is kept
    return summarise(read_record(job.scratch), phases)


def kind_of_balance(asked: str, *, biased: bool) -> str:
    """What `auto` stands for: the selection bias where the architecture has one."""
    if asked == "auto":
        return "selection_bias" if biased else "loss"
    return asked


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
