"""The command `python -m pipeline`: command-line words to a run, errors to exit codes."""

import logging
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from time import sleep

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig

from instruments.errors import FAILED, ConfigError, UserError, exit_code, printable
from pipeline.check import InvalidSettingsError, find_errors
from pipeline.interrupts import answered_interrupts
from pipeline.overrides import expand_words, first_word, flag_errors, override_errors, parse_overrides, quote
from pipeline.plan import Step
from pipeline.run import run_pipeline
from pipeline.runs import compare, find_runs
from pipeline.settings import SHOWING, Settings, compose, run_hydra
from stages.artifacts.job import GO_ON, LostWorkerError, find_workers
from stages.artifacts.rendering import render

logger = logging.getLogger(__name__)

# Seconds that the other workers wait before they report wrong settings. Usually all workers find the same errors, the
# leading worker prints them, and torchrun then stops the others. Otherwise only this worker's machine has the error.
HEAD_START = 3
SWEEPING = {"-m", "--multirun"}


def run_command(words: Sequence[str]) -> int:
    """Exit code: 0 done, 1 a stage or a job failed, 2 wrong settings (nothing was started), 130 interrupted."""
    workers = find_workers()
    if workers.world > 1:
        signal.signal(signal.SIGTERM, stop_in_words)  # torchrun sends it to all workers when one is lost

    def work() -> None:
        try:
            with answered_interrupts():
                start(words)
        except ConfigError:
            if not workers.leads:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                sleep(HEAD_START)
            raise

    return exit_code(work, "" if workers.world == 1 else f"worker {workers.rank}: ")


def stop_in_words(_signal: int, _frame: object) -> None:
    """Exit at once with a message: waiting for a lost worker would never end, and all sums are flushed."""
    error = LostWorkerError(
        "stopped by torchrun: another worker is gone, or the job was ended",
        where="signal SIGTERM",
        do=f"see the other workers' messages, {GO_ON}",
    )
    sys.stderr.write(f"worker {find_workers().rank}: {error}\n")
    sys.stderr.flush()
    os._exit(FAILED)


def start(words: Sequence[str]) -> list[Step]:
    """Check the words, then compose the settings and carve; returns the run's steps.

    With a flag such as `--multirun` Hydra reads the words, and the list is empty.
    """
    words = expand_words(words)
    flags = {word for word in words if word.startswith("-")}
    if wrong := flag_errors(words):
        raise InvalidSettingsError(wrong)
    settings = [word for word in words if "=" in word and word not in flags] if flags else words
    if faults := override_errors(settings, sweep=bool(SWEEPING & flags)):
        errors: list[UserError] = [error for found in faults.values() for error in found]
        if not flags:  # also report the errors of the other words
            sound = [word for word in words if word not in faults]
            errors += find_errors(compose(sound)[0], sound, {first_word(word) for word in faults})
        raise InvalidSettingsError(errors)
    if flags:
        if SWEEPING & flags and not SHOWING & flags and (errors := sweep_errors(settings)):
            raise InvalidSettingsError(errors)
        # Hydra requires all settings next to each other.
        sys.argv[1:] = [*(word for word in words if word not in settings), *settings]
        if SWEEPING & flags and not SHOWING & flags:
            run_sweep(settings)
        else:
            run_hydra(run_pipeline)
        return []
    return run_pipeline(*compose(words), words)


def split_jobs(words: Sequence[str]) -> tuple[set[str], list[list[str]]]:
    """The swept settings, and the words of all jobs."""
    overrides = parse_overrides(words)
    swept = {override.get_key_element() for override in overrides if override.is_sweep_override()}
    (jobs,) = BasicSweeper.split_arguments(overrides, None)
    return swept, jobs


def run_sweep(words: Sequence[str]) -> None:
    """Run all jobs, and compare them in a table at the end. Raises UserError: a job failed; the others still ran."""
    swept, jobs = split_jobs(words)
    if "output_dir" in swept:
        run_hydra(run_job)
        return
    settings, folder = compose([*jobs[0], "hydra.run.dir=${hydra.sweep.dir}"])
    sys.argv.append(quote("hydra.sweep.dir", folder))  # which otherwise depends on the time
    try:
        with find_workers().connected():  # for all jobs: a second connection may reach the first one's meeting place
            run_hydra(run_job)
    finally:
        if (runs := find_runs(folder)) and find_workers().leads:
            sys.stdout.write(f"\n{render(compare(Path(settings.output_dir), runs), 'simple')}\n")


def sweep_errors(words: Sequence[str]) -> list[UserError]:
    """The errors of all jobs of a sweep, each once with the jobs that have it."""
    swept, jobs = split_jobs(words)
    found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for number, job in enumerate(jobs):
        name = " ".join([f"job {number},", *(word for word in job if word.partition("=")[0] in swept)])
        try:
            errors = find_errors(compose(job)[0], job)
        except ConfigError as wrong:
            errors = [wrong]
        for error in errors:
            found[error.what, error.where, error.do].append(name)
    return [
        ConfigError(what, where=where if len(names) == len(jobs) else "; ".join(filter(None, [where, *names])), do=do)
        for (what, where, do), names in found.items()
    ]


def run_job(settings: Settings, folder: Path, words: Sequence[str]) -> None:
    """A job of a sweep, which waits for results of other jobs. Raises UserError: it failed; the error is on stderr."""
    try:
        run_pipeline(settings, folder, words, wait=True)
    except UserError as error:
        sys.stderr.write(printable(f"job {HydraConfig.get().job.num}, {' '.join(words)}\n{error}\n\n"))
        if find_workers().world > 1:  # the others are in the middle of this job; torchrun stops them
            sys.stderr.flush()
            os._exit(FAILED)
        what = "not every job of the sweep is done; the errors are above"
        raise UserError(what, do="the same command again, which keeps all finished results") from error
