"""One carve, from settings to a report."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.disk import explain_os_error
from pipeline.participant import take_part
from pipeline.plan import Step, make_plan
from pipeline.run_folder import RunFolder
from pipeline.runner import Runner
from pipeline.schema import Settings
from pipeline.shape_advice import describe_shape, find_remedy, shape_warnings
from pipeline.stages_table import ALL
from pipeline.validation import Checked, validate
from stages.contracts.workers import Workers, find_workers

log = logging.getLogger(__name__)


def carve(settings: Settings, folder: Path, overrides: Sequence[str]) -> None:
    """Validate everything, then run what is due, keeping the record in `folder`.

    Raises:
        UserError: the settings are wrong, or a stage failed.
    """
    checked, workers = validate(settings), find_workers()
    with workers.connected():
        steps = agree_on_plan(make_plan(checked), workers)
        if not workers.leads:
            take_part(steps, workers)
            return
        try:
            run_folder = RunFolder(folder, settings, overrides)
        except OSError as error:
            raise explain_os_error(error, where="start of the run", folder=folder) or error from error
        with run_folder.logging():
            introduce(checked)
            Runner(run_folder, overrides, workers).run(steps, alone=settings.stage != ALL)


def agree_on_plan(steps: Sequence[Step], workers: Workers) -> list[Step]:
    """The leading worker's plan: what another process publishes meanwhile must not send the workers different ways."""
    due = workers.follow([step.due for step in steps])
    return [replace(step, due=is_due) for step, is_due in zip(steps, due, strict=True)]


def introduce(checked: Checked) -> None:
    """Say what is carved into what, what that comes to, and what speaks against it."""
    source = f"{checked.settings.model.label}: {checked.source['num_hidden_layers']} layers of {checked.width} neurons"
    shape = checked.shape
    if shape is None:
        log.info("%s\n", source)
        return
    log.info(
        "%s -> %d experts of %d%s, %d per token, and %d always on",
        source,
        shape.experts,
        shape.n,
        " in all, shared by every layer" if shape.pooled else "",
        shape.top_k,
        shape.always_on,
    )
    log.info("%s\n", "\n".join(f"  {line}" for line in describe_shape(checked.request, shape)))
    if warnings := shape_warnings(checked.request, shape):
        remedy = find_remedy(checked.request)
        log.warning("%s\n", "\n".join([*warnings, *([f"  do:    {remedy}"] if remedy else [])]))
