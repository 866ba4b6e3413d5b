"""All that can be wrong with the settings, found at once and before any weights are loaded."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from models.errors import ConfigError, UserError
from models.families.target_choice import check_target, select_target
from models.shape import Shape
from models.source import check_source, read_source_config
from pipeline.consistency import contradictions, involves, map_errors
from pipeline.disk import nearest_existing
from pipeline.field_rules import field_errors, unknown_choice
from pipeline.layout import OVERLAYS, groups
from pipeline.schema import Settings
from pipeline.shape import Dials, resolve_shape
from pipeline.shape_advice import Request, shape_errors
from pipeline.stages_table import ALL, STAGES, Stage, Uses, with_ancestors
from pipeline.unread import find_uses, warn_of_unread
from stages.data.identity import check_data
from stages.data.settings import check_length
from stages.stores.config import StoreConfig
from stages.stores.redis_connection import check_store


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

    @property
    def uses(self) -> Uses:
        """What the stages read of each other."""
        return find_uses(self.settings, self.shape, self.width)

    @property
    def width(self) -> int:
        """F, neurons in one FFN of the source."""
        return width_of(self.source)

    @property
    def request(self) -> Request:
        """What was asked for, to judge its shape by."""
        return Request(dials_of(self.settings), self.settings.assemble, self.source)


def validate(settings: Settings) -> Checked:
    """Check the settings against each other, the source model, the data and the disk.

    Raises:
        InvalidSettingsError: with every error found.
    """
    if errors := find_errors(settings):
        raise InvalidSettingsError(errors)
    source = read_source_config(settings.model)
    return Checked(settings, resolve_shape(dials_of(settings), width_of(source)) if carves(settings) else None, source)


def find_errors(settings: Settings, doubtful: Set[str] = frozenset()) -> list[UserError]:
    """Every error in the settings.

    Args:
        settings: all of them.
        doubtful: first words of settings that could not be read and stand at their defaults. What depends on them is
            not checked: it would complain about values that nobody chose.
    """
    errors: list[UserError] = [*stage_errors(settings), *field_errors(settings), *label_errors(settings)]
    errors += output_errors(settings)
    sound = not errors and doubtful <= groups().keys() - {"model", "assemble", *OVERLAYS}
    errors += contradictions(settings)
    if "data" not in doubtful:
        errors += check_data(settings.data, heldout=reads_heldout(settings))
    if "store" not in doubtful:
        errors += store_errors(settings.store)
    source = None
    if "model" not in doubtful:
        if source_faults := check_source(settings.model):
            errors += source_faults
        else:
            source = read_source_config(settings.model)
            errors += source_errors(settings, source, doubtful)
    if source is not None and sound and carves(settings):
        errors += carve_errors(settings, source)
        width = width_of(source)
        clusters = involves(settings, "cluster")
        warn_of_unread(settings, resolve_shape(dials_of(settings), width), width, clusters=clusters)
    else:
        warn_of_unread(settings)
    return errors


def source_errors(settings: Settings, source: Mapping[str, Any], doubtful: Set[str]) -> Iterator[UserError]:
    """Settings that a sound source has no room for: sequences too long for it, layers that it does not have."""
    if "data" not in doubtful:
        yield from check_length(settings.data, source)
    yield from map_errors(settings, source)


def carve_errors(settings: Settings, source: Mapping[str, Any]) -> Iterator[UserError]:
    """A shape that the source does not allow, or a target that cannot say it."""
    width = width_of(source)
    shape = resolve_shape(dials_of(settings), width)
    yield from shape_errors(Request(dials_of(settings), settings.assemble, source), shape, settings.model.label)
    try:
        target = select_target(
            str(source["model_type"]), settings.assemble.target, shape.always_on, pooled=shape.pooled
        )
    except UserError as error:
        yield error
    else:
        yield from check_target(source, target, shape)


def width_of(source: Mapping[str, Any]) -> int:
    """F of the source, from its config.json."""
    return int(source["intermediate_size"])


def dials_of(settings: Settings) -> Dials:
    """The dials of the shape."""
    dials = settings.experts, settings.n, settings.top_k, settings.always_on, settings.active, settings.topology
    return Dials(*dials)


def carves(settings: Settings) -> bool:
    """Whether any stage to be run or used depends on the shape."""
    return any("shape" in stage.nodes for stage in _wanted(settings))


def reads_heldout(settings: Settings) -> bool:
    """Whether any stage to be run or used reads held-out text."""
    return any(stage.reads_heldout for stage in _wanted(settings))


def _wanted(settings: Settings) -> tuple[Stage, ...]:
    return with_ancestors(settings.stage, find_uses(settings))


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


def store_errors(store: StoreConfig) -> Iterator[UserError]:
    """A server that cannot be reached, or does not let us in."""
    try:
        check_store(store)
    except UserError as error:
        yield error


def output_errors(settings: Settings) -> Iterator[ConfigError]:
    """A place where nothing can be written."""
    place = nearest_existing(Path(settings.output_dir))
    if not place.is_dir():
        yield ConfigError(f"{place} is a file, not a folder", where="setting output_dir", do="output_dir=outputs")
        return
    try:
        # Really writing tells more than the permission bits: root, read-only mounts, kernel file systems.
        with TemporaryFile(dir=place):
            pass
    except OSError as error:
        yield ConfigError(
            f"cannot write to {place}: {error.strerror}",
            where="setting output_dir",
            do="output_dir= a folder you may write to",
        )
