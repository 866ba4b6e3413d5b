"""Run the due steps of a plan, publish what they make, and say what happened."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from models.errors import UserError
from pipeline.artifact import Manifest, is_complete, verify
from pipeline.command import command_line
from pipeline.disk import explain_os_error, in_mib
from pipeline.memory import peak_bytes, start_measuring
from pipeline.next_step import next_commands, written_files
from pipeline.plan import Step
from pipeline.publish import open_workshop, publish, remove_leftovers
from pipeline.run_folder import RunFolder, render
from stages.contracts.job import Job, Table
from stages.contracts.workers import ALONE, Workers

log = logging.getLogger(__name__)

NEW_LINE = "\n" + " " * 11  # under the first word after a heading
CHECKPOINT_STAGES = ("assemble", "project", "train")


class Runner:
    """One run of a plan."""

    def __init__(self, run_folder: RunFolder, overrides: Sequence[str], workers: Workers = ALONE) -> None:
        """`overrides` are the words of the command line, for remedies that can be pasted."""
        self.run_folder = run_folder
        self.overrides = overrides
        self.workers = workers
        self.trusted: set[Path] = set()  # published or verified by this process

    def run(self, steps: Sequence[Step], *, alone: bool = False) -> None:
        """Run what is due; keep the rest. At the end of a stage that was asked for `alone` say how to go on.

        Raises:
            UserError: a stage failed, or its inputs are damaged. What was published before stays.
        """
        for position, step in enumerate(steps):
            try:
                self.run_step(step) if step.due else self.keep(step)
            except KeyboardInterrupt:
                kept = ", ".join(done.stage.name for done in steps[:position]) or "nothing yet"
                log.info("\nstopped in %s; kept: %s; the same command goes on from there", step.stage.name, kept)
                self.leave_page(steps[:position])
                raise
            except Exception as error:
                self.leave_page(steps[:position])
                where, folder = f"stage={step.stage.name}", step.folder.parent
                explained = explain_os_error(error, where=where, folder=folder, expected=step.expected_bytes)
                if explained is None:
                    raise
                raise explained from error
        self.close(steps, alone=alone)

    def keep(self, step: Step) -> None:
        """Say that a published result is used again, and clean up beside it."""
        remove_leftovers(step.folder.parent)
        self.run_folder.record_stage(step.stage.name, step.fingerprint)
        log.info("%-9s kept from an earlier run: %s", step.stage.name, shown(step.folder))

    def run_step(self, step: Step) -> None:
        """Run one stage in its workshop and publish the result."""
        with open_workshop(step.folder, fresh=step.fresh) as workshop:
            kept = is_complete(step.folder) and not step.fresh  # published by another run since the plan was made
            if step.stage.shared:
                self.workers.follow(not kept)
            if kept:
                self.keep(step)
                return
            self.verify_parents(step)
            log.info("%-9s running", step.stage.name)
            start_measuring()
            start = time.perf_counter()
            job = Job(step.parents, workshop.out, workshop.scratch, step.fingerprint, self.workers, step.fresh)
            table = step.stage.run(job, **step.inputs)
            publish(workshop, fingerprint=step.fingerprint, recipe=step.recipe, table=table)
        self.trusted.add(step.folder)
        self.tell(step, table, time.perf_counter() - start)

    def verify_parents(self, step: Step) -> None:
        """Check the inputs against their manifests, once per run."""
        for name, folder in step.parents.items():
            if folder not in self.trusted:
                verify(folder, remedy=command_line(self.overrides, stage=name, fresh="true"))
                self.trusted.add(folder)

    def tell(self, step: Step, table: Table, seconds: float) -> None:
        """Print what a stage found, and add it to the report."""
        peak = peak_bytes()
        headline = f"{seconds:.1f} s, peak memory {in_mib(peak)}, {shown(step.folder)}"
        log.info("\n%s\n\n%-9s done in %s\n", render(table, "simple"), step.stage.name, headline)
        self.run_folder.append_stage(step.stage.name, headline, table)
        self.run_folder.record_stage(step.stage.name, step.fingerprint, seconds, peak)

    def close(self, steps: Sequence[Step], *, alone: bool) -> None:
        """Repeat the table of a last stage that was kept, point at files, checkpoint, report and the next command."""
        last = steps[-1]
        remedy = command_line(self.overrides, stage=last.stage.name, fresh="true")
        manifest = Manifest.read(last.folder, remedy=remedy)
        if not last.due:
            table = manifest.table
            log.info("\n%s\n", render(table, "simple"))
            self.run_folder.append_stage(last.stage.name, f"kept, {shown(last.folder)}", table)
        if alone:
            log.info("files      %s", NEW_LINE.join(written_files(Path(shown(last.folder)), manifest)))
        checkpoints = [step.folder / "checkpoint" for step in steps if step.stage.name in CHECKPOINT_STAGES]
        if checkpoints:
            link = self.run_folder.link_checkpoint(checkpoints[-1])
            log.info("checkpoint %s\n           %s", shown(checkpoints[-1]), shown(link))
        log.info("report     %s", shown(self.write_page(last.folder) or self.run_folder.report))
        words, commands = next_commands(last.stage.name, self.overrides) if alone else ("", [])
        if words:
            log.info("next       %s", NEW_LINE.join([words, *commands]))

    def leave_page(self, done: Sequence[Step]) -> None:
        """The page of a run that ends early, about what it finished."""
        if done:
            self.write_page(done[-1].folder)

    def write_page(self, last: Path) -> Path | None:
        """The page about the result of the last stage; a run is no failure because it cannot be drawn."""
        try:
            return self.run_folder.write_page(last)
        except (UserError, OSError) as error:
            log.warning("no report.html: %s", error)
            return None


def shown(path: Path) -> str:
    """A path as short as it can be pasted in the working folder."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
