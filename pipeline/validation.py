"""All that can be wrong with the settings, found at once and before any weights are loaded."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.errors import ConfigError, UserError
from models.families.moe import select_target
from models.shape import Shape
from models.source import check_source, read_source_config
from pipeline.disk import nearest_existing
from pipeline.field_rules import field_errors, unknown_choice
from pipeline.schema import Settings
from pipeline.shape import Dials, resolve_shape, shape_errors
from pipeline.stages_table import ALL, STAGES, Stage, asked_stages, with_ancestors
from stages.data.identity import check_data


class InvalidSettingsError(ConfigError):
    """Several errors, reported together."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        """Join the texts of all errors, each once."""
        self.errors = list({str(error): error for error in errors}.values())
        super().__init__("\n\n".join(str(error) for error in self.errors))


@dataclass(frozen=True)
class Checked:
    """Settings in which no fault was found."""

    settings: Settings
    # None when no asked stage depends on it.
    shape: Shape | None
    # The source's config.json.
    source: Mapping[str, Any]


def validate(settings: Settings) -> Checked:
    """Check the settings against each other, the source model, the data and the disk.

    Raises:
        InvalidSettingsError: with every error found.
    """
    own = [*stage_errors(settings), *field_errors(settings), *label_errors(settings), *output_errors(settings)]
    source_faults = check_source(settings.model)
    errors: list[UserError] = [*own, *source_faults, *check_data(settings.data)]
    source: Mapping[str, Any] = {}
    shape = None
    if not source_faults:
        source = read_source_config(settings.model)
    if not own and not source_faults and reads_shape(with_ancestors(asked_stages(settings.stage))):
        width = int(source["intermediate_size"])
        shape = resolve_shape(dials_of(settings), width)
        errors += [*shape_errors(shape, width, settings.model.label), *target_errors(settings, source, shape)]
    if errors:
        raise InvalidSettingsError(errors)
    return Checked(settings, shape, source)


def dials_of(settings: Settings) -> Dials:
    """The dials of the shape."""
    return Dials(settings.experts, settings.n, settings.top_k, settings.always_on, settings.active)


def reads_shape(stages: Sequence[Stage]) -> bool:
    """Whether any of the stages depends on the shape."""
    return any("shape" in stage.nodes for stage in stages)


def stage_errors(settings: Settings) -> Iterator[ConfigError]:
    """An unknown stage."""
    if settings.stage != ALL and settings.stage not in STAGES:
        yield unknown_choice("stage", settings.stage, [ALL, *STAGES])


def label_errors(settings: Settings) -> Iterator[ConfigError]:
    """A label that is no plain folder name."""
    label = settings.model.label
    if not label or label.startswith(".") or Path(label).name != label:
        yield ConfigError(
            f"model.label={label} is no plain folder name",
            where="setting model.label",
            do=f"model.label={Path(label).name.strip('.') or 'source'}",
        )


def output_errors(settings: Settings) -> Iterator[ConfigError]:
    """A place where nothing can be written."""
    place = nearest_existing(Path(settings.output_dir))
    if not place.is_dir():
        yield ConfigError(f"{place} is a file, not a folder", where="setting output_dir", do="output_dir=outputs")
    elif not os.access(place, os.W_OK | os.X_OK):
        yield ConfigError(
            f"may not write to {place}", where="setting output_dir", do="output_dir= a folder you may write to"
        )


def target_errors(settings: Settings, source: Mapping[str, Any], shape: Shape) -> Iterator[UserError]:
    """A target architecture that cannot say what was asked."""
    try:
        select_target(str(source["model_type"]), settings.assemble.target, shape.always_on)
    except UserError as error:
        yield error
