"""Runs one carve: validates the settings, runs the due stages, writes the report."""

import logging
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors import SafetensorError

from instruments.errors import ConfigError, UserError
from instruments.files import hash_code, write_text
from pipeline import artifacts
from pipeline.artifacts import READ
from pipeline.check import Checked, check_settings, validate
from pipeline.disk import explain_os_error
from pipeline.help import REPOSITORY
from pipeline.overrides import command_line
from pipeline.plan import Step, check_sources, describe_plan, find_checkpoint, is_stale, make_plan, published_recipe
from pipeline.resources import measured_peak, memory_warnings, record_seconds, room_errors, start_measuring
from pipeline.run_folder import RunFolder, logging_to, replace_link
from pipeline.settings import ALL, AUTO_LAYERS, LAYERS, STAGES, Settings
from pipeline.shape import shape_text, weakness_text
from stages.artifacts.job import ALONE, Job, Table, Workers, find_workers
from stages.artifacts.rendering import in_mib, render
from stages.layers.choice import choose_dense_layers

log = logging.getLogger(__name__)

# The packages whose code affects results.
SOURCE_PACKAGES = ("pipeline", "stages", "models", "instruments")

# Stage, or all → the changed settings of the commands that continue after a run of `stage=<that stage>`.
NEXT: dict[str, list[dict[str, str]]] = {
    "scan": [{"stage": "score"}, {"stage": "project"}],
    "score": [{"stage": "cluster"}],
    "cluster": [{"stage": "extract"}],
    "extract": [{"stage": "assemble"}],
    "assemble": [{"stage": "project"}],
    "project": [{"stage": "evaluate"}, {"stage": "train"}],
    "train": [{"stage": "evaluate", "evaluate.checkpoint": "train"}],
    ALL: [{"stage": "train"}],
}


def next_commands(stage: str, overrides: Sequence[str]) -> list[str]:
    """The commands that go on from a stage: the typed settings with another stage."""
    # A folder of its own belongs to this run: the next one would overwrite its record.
    kept = [word for word in overrides if word.lstrip("+").partition("=")[0] not in {"fresh", "hydra.run.dir"}]
    return [command_line(kept, **change) for change in NEXT.get(stage, [])]


def shown(path: Path) -> str:
    """The path, relative to the working folder if it is inside it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


@dataclass
class Runner:
    """One run of a plan."""

    run_folder: RunFolder
    overrides: Sequence[str]  # words of the command line, for remedies
    checked: Checked
    workers: Workers = ALONE
    wait: bool = False  # for results that another run is computing

    def __post_init__(self) -> None:
        self.hash_of = artifacts.FileHashes(self.run_folder.output_dir)

    def run(self, steps: Sequence[Step]) -> None:
        """Run the due steps and verify the others.

        Raises UserError: a stage failed, or its inputs are damaged. Results published before stay.
        """
        self.verify_kept(steps)
        for step in steps:
            _ = step.due and step.stage.run  # imported before the first begins: its code may be edited meanwhile
        done: list[Step] = []
        for planned in steps:
            # An earlier step of this run may have computed its parent with other tensors.
            step = planned if planned.due or not is_stale(planned) else replace(planned, due=True)
            try:
                if step.stage.shared and not step.due:
                    self.workers.broadcast(False)
                self.run_step(step) if step.due else self.keep(step)
            except (Exception, KeyboardInterrupt) as error:
                if isinstance(error, KeyboardInterrupt):
                    kept = ", ".join(earlier.stage.name for earlier in done) or "nothing yet"
                    again = "the same command goes on from there"
                    if self.checked.settings.fresh:
                        again = "the same command starts over; without fresh=true it keeps all published results"
                    log.info("\nstopped in %s; kept: %s; %s", step.stage.name, kept, again)
                elif done:  # a page takes seconds
                    self.write_page(done[-1].folder)
                where, folder = f"stage={step.stage.name}", step.folder.parent
                if explained := explain_os_error(error, where=where, folder=folder, expected=step.expected_bytes):
                    raise explained from error
                raise
            done.append(step)
        self.close(done)

    def verify_kept(self, steps: Sequence[Step]) -> None:
        """Verify the kept results, and the checkpoint that a kept evaluation has read. Raises ContractError."""
        kept = {step.stage.name: step.folder for step in steps if not step.due}
        if not steps[-1].due:
            read, planned = find_checkpoint(steps), {step.folder for step in steps}
            parents = {name: folder for name, folder in steps[-1].parents.items() if folder not in planned}
            kept |= {name: folder for name, folder in parents.items() if folder / "checkpoint" == read}
        for name, folder in kept.items():
            self.verify(name, folder)

    def keep(self, step: Step) -> None:
        """Record that a published result is used again, and clean up after killed runs of its stage."""
        artifacts.remove_leftovers(step.folder)
        self.run_folder.record_stage(step.stage.name, step.fingerprint)
        log.info("%-9s kept from an earlier run: %s", step.stage.name, shown(step.folder))

    def run_step(self, step: Step) -> None:
        """Run one stage in its staging folder and publish the result."""
        recipe = published_recipe(step)
        with artifacts.open_staging(step.folder, fresh=step.fresh, wait=self.wait, read=recipe[READ]) as staging:
            # Published by another run since the plan was made, or its parents were computed again to the same tensors.
            kept = artifacts.is_complete(step.folder) and not step.fresh and not is_stale(step)
            if step.stage.shared:
                self.workers.broadcast(not kept)
            if kept:
                self.verify(step.stage.name, step.folder)
                self.keep(step)
                return
            for name, folder in step.parents.items():
                self.verify(name, folder)
            check_sources(step, self.hash_of, done=False)
            whole = not any(staging.scratch.iterdir())
            log.info("%-9s running (%s)", step.stage.name, step.reason or "a stage before it ran")
            start = time.perf_counter()
            start_measuring()
            job = Job(step.parents, staging.out, staging.scratch, step.fingerprint, self.workers, step.fresh)
            table = run_stage(step, job, self.overrides)
            check_sources(step, self.hash_of, done=True)
            artifacts.publish(staging, fingerprint=step.fingerprint, recipe=recipe, table=table)
        seconds = time.perf_counter() - start
        if whole:
            record_seconds(step.stage.name, self.checked, seconds)
        self.report_stage(step, table, seconds)
        self.hash_of.save()

    def verify(self, stage: str, folder: Path) -> None:
        """Check a kept result, or an input, against its manifest. Raises ContractError."""
        artifacts.verify(folder, remedy=command_line(self.overrides, stage=stage, fresh="true"), hash_of=self.hash_of)

    def report_stage(self, step: Step, table: Table, seconds: float) -> None:
        """Log the table of a stage and add it to the record."""
        peak = measured_peak()
        headline = f"{seconds:.1f} s, peak memory {in_mib(peak)}, {shown(step.folder)}"
        log.info("\n%s\n\n%-9s done in %s\n", render(table, "simple"), step.stage.name, headline)
        self.run_folder.record_stage(step.stage.name, step.fingerprint, seconds, peak)

    def write_page(self, last: Path) -> Path | None:
        """Write report.html about the published result `last`; a failure only warns."""
        from pipeline.report import draw_page  # noqa: PLC0415 - loads matplotlib

        folder = self.run_folder.folder
        try:
            config = (folder / "config.yaml").read_text(encoding="utf-8")
            label, page = self.checked.settings.model.label, folder / "report.html"
            write_text(page, draw_page(self.run_folder.record, label, config, last))
        except (UserError, SafetensorError, *artifacts.UNREADABLE) as error:  # results of earlier stages may be damaged
            log.warning("no report.html: %s", error)
            return None
        return page

    def close(self, steps: Sequence[Step]) -> None:
        """Log the last stage's table if it was kept, then checkpoint, report and the next commands."""
        self.hash_of.save()
        last = steps[-1]
        remedy = command_line(self.overrides, stage=last.stage.name, fresh="true")
        if self.run_folder.record.stages[-1].seconds is None:
            log.info("\n%s\n", render(artifacts.Manifest.read(last.folder, remedy=remedy).table, "simple"))
        for step in steps:
            if folder := getattr(step.inputs.get("dump"), "folder", None):
                Path(folder).parent.mkdir(parents=True, exist_ok=True)
                replace_link(Path(folder), step.folder)
        checkpoint = find_checkpoint(steps)
        place = checkpoint
        try:
            latest = self.run_folder.link_latest(checkpoint)
            place = checkpoint and latest / "checkpoint"
        except OSError as error:
            log.warning("no links to this run: %s", error)
        if places := dict.fromkeys(shown(path) for path in (checkpoint, place) if path):
            log.info("checkpoint %s", ("\n" + " " * 11).join(places))
        if page := self.write_page(last.folder):
            log.info("report     %s", shown(page))
        commands = next_commands(self.checked.settings.stage, self.overrides)
        if place is not None:
            commands.insert(0, f'python -m pipeline generate {shlex.quote(shown(place))} "def main("')
        if commands:
            log.info("next       %s", ("\n" + " " * 11).join(commands))


def run_stage(step: Step, job: Job, overrides: Sequence[str]) -> Table:
    """Run one stage. Raises UserError: the stage failed, or memory did not suffice."""
    from models.loading import explained_memory  # noqa: PLC0415 - loads torch

    where = f"stage={step.stage.name}; plan=true shows what it needs, and settings that need less"
    with explained_memory(where, command_line(overrides, plan="true")):
        return step.stage.run(job, **step.inputs)


def run_shared_steps(steps: Sequence[Step], workers: Workers, overrides: Sequence[str]) -> None:
    """Run this worker's share of every shared step that the leading worker begins. Raises UserError."""
    for step in steps:
        if not (step.stage.shared and workers.broadcast(None)):
            continue
        require_parents(step, workers)
        scratch = artifacts.StagingDir(step.folder).scratch
        scratch.mkdir(parents=True, exist_ok=True)  # missing on another machine's disk
        with TemporaryDirectory() as out:
            job = Job(step.parents, Path(out), scratch, step.fingerprint, workers, step.fresh)
            start_measuring()  # as the leading worker: frees the memory of earlier stages
            run_stage(step, job, overrides)


def require_parents(step: Step, workers: Workers) -> None:
    """Raises ConfigError: this worker does not find the leading worker's results, so its disk may be another one."""
    if missing := [folder for folder in step.parents.values() if not artifacts.is_complete(folder)]:
        what = f"worker {workers.rank} does not find the results that stage={step.stage.name} starts from"
        raise ConfigError(what, where=", ".join(map(str, missing)), do="output_dir= on a disk that all workers share")


def run_pipeline(settings: Settings, folder: Path, overrides: Sequence[str], *, wait: bool = False) -> list[Step]:
    """Validate all settings, then run the due stages, with the record of the run in `folder`. Raises UserError.

    Returns the steps; with `plan=true` they have not run.

    With `wait`, wait for results that another run is computing: the jobs of a sweep begin with the same stages.
    """
    checked = validate(settings, overrides)
    if settings.dense_layers is None and checked.shape is not None:
        steps = measure_layers(settings, folder, overrides, wait=wait)
        if settings.plan and steps[-1].due:
            sys.stdout.write("\nThese stages find dense_layers=auto; the plan of the carve can be shown after them.\n")
            return steps
        found = choose_layers(checked, steps[-1].folder)
        checked = check_settings(replace(settings, dense_layers=found), overrides)
    return run_steps(checked, folder, overrides, wait=wait)


def run_steps(checked: Checked, folder: Path, overrides: Sequence[str], *, wait: bool = False) -> list[Step]:
    """`run_pipeline` with settings that passed validation."""
    settings, workers = checked.settings, find_workers()
    workers.pick_device(settings.model.device)
    with workers.connected():
        steps = agree_on_plan(make_plan(checked), workers)
        due = [step.stage.name for step in steps if step.due]
        if settings.plan:
            if workers.leads:
                carve = checked.request, checked.shape
                parts = [shape_text(*carve, settings.model.label), weakness_text(*carve)]
                parts += [render(describe_plan(checked, steps), "simple"), *memory_warnings(checked, due)]
                parts += map(str, room_errors(checked, due))
                sys.stdout.write("\n\n".join(filter(None, parts)) + "\n")
            return steps
        if not workers.leads:
            run_shared_steps(steps, workers, overrides)
            return steps
        try:
            with ExitStack() as held:
                run_folder = RunFolder(folder, settings, overrides, [step.folder for step in steps])
                held.enter_context(logging_to(folder / "run.log"))
                # A result that was removed since the plan was made is found missing when it is verified.
                held.enter_context(artifacts.output_in_use(Path(settings.output_dir)))
                log.info("%s\n", shape_text(checked.request, checked.shape, settings.model.label))
                if weak := weakness_text(checked.request, checked.shape):
                    log.warning("%s\n", weak)
                if "=".join(AUTO_LAYERS) in overrides and checked.shape:
                    log.info("dense_layers=auto is %s\n", settings.dense_layers)
                for warning in memory_warnings(checked, due):
                    log.warning("%s\n", warning)
                Runner(run_folder, overrides, checked, workers, wait).run(steps)
        except OSError as error:  # from writing the record; errors of stages are already UserErrors
            raise explain_os_error(error, where="the record of the run", folder=folder) or error from error
    return steps


def measure_layers(settings: Settings, folder: Path, overrides: Sequence[str], *, wait: bool) -> list[Step]:
    """Run stage=layers, if it has no result, with a run folder of its own; its steps. Raises UserError."""
    checked = check_settings(replace(settings, stage=LAYERS, fresh=settings.fresh and settings.stage == ALL))
    steps = make_plan(checked)
    if not steps[-1].due:
        return steps
    if find_workers().world > 1:
        do = f"first, without torchrun: {command_line(overrides, stage=LAYERS)}"
        raise ConfigError("one process measures the layers, here are several", where="setting dense_layers=auto", do=do)
    return run_steps(checked, folder.with_name(f"{folder.name}-{LAYERS}"), [*overrides, f"stage={LAYERS}"], wait=wait)


def choose_layers(checked: Checked, measured: Path) -> list[int]:
    """The layers that stay dense by the costs in the result `measured` of stage=layers. Raises ContractError."""
    from stages.artifacts.carve import LayerCosts  # noqa: PLC0415 - loads torch

    assert checked.shape is not None, "only a carve has dense layers"
    able = checked.request.target(checked.shape).dense_layers
    costs = LayerCosts.load(measured)
    return choose_dense_layers(costs.divergence.tolist(), costs.active, able)


def agree_on_plan(steps: Sequence[Step], workers: Workers) -> list[Step]:
    """Replace every worker's plan by the leading worker's: another process may publish a result during planning.

    Raises ConfigError: another worker runs different code, has different settings, or reads a different model or text.
    """
    code = hash_code(REPOSITORY, SOURCE_PACKAGES) if workers.world > 1 else ""
    plan = [(step.stage.name, step.fingerprint, step.due) for step in steps]
    codes, plans = zip(*workers.gather((code, plan)), strict=True)
    if others := [rank for rank, theirs in enumerate(codes) if theirs != code]:
        what = f"workers {workers.rank} and {others[0]} run different code"
        where = f"the checkout of this worker, {REPOSITORY}, and that of worker {others[0]}"
        raise ConfigError(what, where=where, do="one checkout, or the same commit on every machine")
    for rank, plan in enumerate(plans):
        theirs, ours = ([step[:2] for step in each] for each in (plan, plans[0]))
        if theirs != ours:
            other = {name for name, _ in {*theirs} ^ {*ours}}
            what = f"workers 0 and {rank} were started with different settings, models or texts"
            do = "one command, one checkout and the same files on every machine"
            raise ConfigError(what, where=f"stages {', '.join(name for name in STAGES if name in other)}", do=do)
    return [replace(step, due=due) for step, (_, _, due) in zip(steps, plans[0], strict=True)]
