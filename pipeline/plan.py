"""Which stages have to run: those asked for and not yet published, and what they start from."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from models.errors import ConfigError
from models.source import source_identity
from pipeline.artifact import is_complete
from pipeline.disk import expected_bytes, free_bytes, in_mib
from pipeline.fingerprint import fingerprint, make_recipe
from pipeline.layout import artifact_folder
from pipeline.stages_table import STAGES, Stage, asked_stages, with_ancestors
from pipeline.validation import Checked
from stages.data.identity import data_identity


@dataclass(frozen=True)
class Step:
    """One stage under one fingerprint."""

    stage: Stage
    fingerprint: str
    recipe: Mapping[str, Any]
    folder: Path  # where its result is, or will be, published
    inputs: Mapping[str, object]  # the keyword arguments of its run
    parents: Mapping[str, Path]
    expected_bytes: int
    due: bool  # has to run
    fresh: bool  # runs although its result may be there


def make_plan(checked: Checked) -> list[Step]:
    """Steps for the asked stages and their ancestors, in the order of the chain.

    Raises:
        ConfigError: the disk has no room for what the due steps will publish.
    """
    settings = checked.settings
    asked = asked_stages(settings.stage)
    nodes = {spec.name: getattr(settings, spec.name) for spec in fields(settings)} | {"shape": checked.shape}
    identities = {"model": source_identity(settings.model), "data": data_identity(settings.data)}
    output_dir = Path(settings.output_dir).absolute()

    found: dict[str, tuple[str, dict[str, Any], Path]] = {}
    for stage in with_ancestors(asked):
        recipe = make_recipe(stage, nodes, identities, {name: found[name][0] for name in stage.parents})
        print_ = fingerprint(recipe)
        found[stage.name] = (print_, recipe, artifact_folder(output_dir, settings.model.label, stage.name, print_))

    fresh = {stage.name for stage in asked} if settings.fresh else set()
    complete = {name for name, (_, _, folder) in found.items() if is_complete(folder)} - fresh
    due = due_stages({stage.name for stage in asked}, complete)
    steps = [
        Step(
            stage=STAGES[name],
            fingerprint=print_,
            recipe=recipe,
            folder=folder,
            inputs={node: nodes[node] for node in STAGES[name].nodes},
            parents={parent: found[parent][2] for parent in STAGES[name].parents},
            expected_bytes=expected_bytes(name, checked.source, checked.shape),
            due=name in due,
            fresh=name in fresh,
        )
        for name, (print_, recipe, folder) in found.items()
    ]
    require_room(steps, output_dir)
    return steps


def due_stages(asked: set[str], complete: set[str]) -> set[str]:
    """Asked stages that are not complete, and every incomplete stage that a due one starts from."""
    wanted, due = set(asked), set()
    for stage in reversed(STAGES.values()):
        if stage.name in wanted and stage.name not in complete:
            due.add(stage.name)
            wanted.update(stage.parents)
    return due


def require_room(steps: list[Step], output_dir: Path) -> None:
    """Refuse to start what the disk cannot hold.

    Raises:
        ConfigError: more bytes will be written than are free.
    """
    wanted = sum(step.expected_bytes for step in steps if step.due)
    free = free_bytes(output_dir)
    if wanted > free:
        writers = ", ".join(step.stage.name for step in steps if step.due and step.expected_bytes)
        raise ConfigError(
            f"about {in_mib(wanted)} will be written, {in_mib(free)} are free",
            where=f"{output_dir}, stages {writers}",
            do="output_dir= on a larger disk, or fewer experts",
        )
