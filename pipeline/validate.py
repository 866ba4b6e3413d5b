"""All that can be wrong with the settings, found at once and before any weights are loaded."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import Field, dataclass, fields, is_dataclass
from difflib import get_close_matches
from operator import gt, le, lt
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from instruments.errors import ConfigError, UserError
from models.config import MoEShape
from models.source import check_source, read_source_config
from models.targets.choose import check_target, select_target
from pipeline.consistency import contradictions, find_uses, involves, map_errors, warn_of_unread
from pipeline.disk import nearest_existing
from pipeline.layout import OVERLAYS, groups
from pipeline.settings import Settings
from pipeline.shape import ShapeRequest, resolve_shape
from pipeline.shape_advice import Request, shape_errors
from pipeline.stages_table import ALL, STAGES, Stage, Uses, with_ancestors
from stages.accumulators.config import StoreConfig
from stages.accumulators.redis_connection import check_store
from stages.text.cache_key import check_data
from stages.text.config import check_length

LIMITS = {"minimum": (lt, "at least"), "above": (le, "above"), "maximum": (gt, "at most")}


def field_errors(node: Any, prefix: str = "") -> Iterator[ConfigError]:  # noqa: ANN401 - any settings dataclass
    """Every setting, at any depth, that breaks the rule beside it."""
    for spec in fields(node):
        value, name = getattr(node, spec.name), f"{prefix}{spec.name}"
        if is_dataclass(value):
            yield from field_errors(value, f"{name}.")
        elif value is not None:
            for item in value if isinstance(value, list) else [value]:
                yield from value_errors(name, item, spec)


def value_errors(name: str, value: Any, spec: Field[Any]) -> Iterator[ConfigError]:  # noqa: ANN401 - any value
    """What is wrong with one value; the remedy is the default, or the bound itself."""
    choices = spec.metadata.get("choices", ())
    if choices and value not in choices:
        yield unknown_choice(name, value, choices)
    for rule, (breaks, words) in LIMITS.items():
        bound = spec.metadata.get(rule)
        if bound is not None and breaks(value, bound):
            remedy = spec.default if isinstance(spec.default, int | float) else bound
            yield ConfigError(f"{name}={value} must be {words} {bound}", where=f"setting {name}", do=f"{name}={remedy}")


def unknown_choice(name: str, value: object, choices: Iterable[object]) -> ConfigError:
    """The error for a name outside a closed list, with the closest name as the remedy."""
    known = [str(choice) for choice in choices]
    close = get_close_matches(str(value), known, n=1, cutoff=0.4)
    return ConfigError(
        f"{name}={value} is none of {', '.join(known)}", where=f"setting {name}", do=f"{name}={(close or known)[0]}"
    )


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
    shape: MoEShape | None
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


def dials_of(settings: Settings) -> ShapeRequest:
    """The dials of the shape."""
    dials = settings.experts, settings.n, settings.top_k, settings.always_on, settings.active, settings.topology
    return ShapeRequest(*dials)


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
