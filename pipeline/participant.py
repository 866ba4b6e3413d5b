"""The part of a worker that does not lead: it helps with shared stages and publishes nothing."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline.plan import Step
from pipeline.publish import Workshop
from stages.contracts.job import Job
from stages.contracts.workers import Workers


def take_part(steps: Sequence[Step], workers: Workers) -> None:
    """Run this worker's share of every shared step that is due, when the leading process begins it.

    Raises:
        UserError: the stage failed, or another worker is gone.
    """
    for step in steps:
        if not (step.due and step.stage.shared and workers.follow(None)):
            continue
        scratch = Workshop(step.folder).scratch
        scratch.mkdir(parents=True, exist_ok=True)  # another machine's disk does not have it
        with TemporaryDirectory() as out:
            step.stage.run(Job(step.parents, Path(out), scratch, step.fingerprint, workers, step.fresh), **step.inputs)
