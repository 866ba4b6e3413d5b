"""Every error in the settings, reported at once and before any weights are loaded."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from math import isfinite
from operator import gt, le, lt
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from omegaconf import MISSING

from instruments.errors import ConfigError, UserError
from models.config import MoEShape
from models.source import check_source, read_source_config
from models.targets.choose import check_target
from pipeline.consistency import contradictions, find_uses, involves, map_errors, warn_of_unread
from pipeline.disk import nearest_existing
from pipeline.help import OVERLAYS, groups
from pipeline.settings import ALL, STAGES, Settings, Stage, Uses, with_ancestors
from pipeline.shape import Request, ShapeRequest, resolve_shape, shape_errors
from stages.accumulators.config import StoreConfig
from stages.accumulators.redis_connection import check_store
from stages.text.cache_key import check_data
from stages.text.config import check_length

LARGEST = 2**63 - 1
LONGEST = 4000  # characters; Linux takes paths of 4,095 bytes
LABEL = re.compile(r"[\w+-][\w.+ -]{0,99}")
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
EMPTY_OUTPUT = ConfigError(
    "output_dir is empty: is a variable of the shell not set?", where="setting output_dir", do="output_dir=outputs"
)
LIMITS = {"minimum": (lt, "at least"), "above": (le, "above"), "maximum": (gt, "at most")}


def field_errors(node: Any, prefix: str = "") -> Iterator[ConfigError]:  # noqa: ANN401 - any settings dataclass
    """Every setting, at any depth, that breaks the rule in its field's metadata."""
    for spec in fields(node):
        value, name = getattr(node, spec.name), f"{prefix}{spec.name}"
        if is_dataclass(value):
            yield from field_errors(value, f"{name}.")
        elif value == [] and spec.metadata.get("nonempty"):
            yield ConfigError(f"{name} is an empty list", where=f"setting {name}", do=f"{name}={sound_value(spec)}")
        elif value is not None:
            for item in value if isinstance(value, list) else [value]:
                if is_dataclass(item):
                    yield from field_errors(item, f"{name}: ")
                else:
                    yield from value_errors(name, item, spec)


def text_errors(node: Any, prefix: str = "") -> Iterator[ConfigError]:  # noqa: ANN401 - any settings dataclass
    """Texts that no file can be called, at any depth: nothing can be asked of the disk about them."""
    for spec in fields(node):
        value, name = getattr(node, spec.name), f"{prefix}{spec.name}"
        if is_dataclass(value):
            yield from text_errors(value, f"{name}.")
        for text in value if isinstance(value, list) else [value]:
            if is_dataclass(text):
                yield from text_errors(text, f"{name}: ")
            if isinstance(text, str) and (
                len(text) > LONGEST or "\0" in text or max(map(_bytes, text.split("/"))) > 255
            ):
                yield ConfigError(
                    f"{name}={text[:60]!r} ... is no name: {len(text):,} characters, or characters that no name has",
                    where=f"setting {name}",
                    do=f"{name}={sound_value(spec)}",
                )


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))


def value_errors(name: str, value: Any, spec: Field[Any]) -> Iterator[ConfigError]:  # noqa: ANN401 - any value
    """Errors of one value; numbers are finite, and whole ones fit in 64 bits."""
    choices = spec.metadata.get("choices", ())
    if choices and value not in choices:
        yield unknown_choice(name, value, choices, listed=callable(spec.default_factory))
    faults = []
    if isinstance(value, float) and not isfinite(value):
        faults.append("a finite number")
    elif isinstance(value, int) and abs(value) > LARGEST:
        faults.append(f"between -{LARGEST} and {LARGEST}")
    else:
        bounds = {rule: spec.metadata[rule] for rule in LIMITS if spec.metadata.get(rule) is not None}
        faults += [f"{LIMITS[rule][1]} {bound}" for rule, bound in bounds.items() if LIMITS[rule][0](value, bound)]
    for fault in faults:
        yield ConfigError(f"{name}={value} must be {fault}", where=f"setting {name}", do=f"{name}={sound_value(spec)}")


def sound_value(spec: Field[Any]) -> str:
    """The default of a setting, as it is pasted."""
    if callable(spec.default_factory):
        return f"[{','.join(f'{item:g}' if isinstance(item, float) else str(item) for item in spec.default_factory())}]"
    if spec.default in (None, MISSING):
        return "null"
    return str(spec.default).lower() if isinstance(spec.default, bool) else str(spec.default)


def unknown_choice(name: str, value: object, choices: Iterable[object], *, listed: bool = False) -> ConfigError:
    """The error for a name outside a closed list, with the closest name as the remedy; `listed`: a list is wanted."""
    known = [str(choice) for choice in choices]
    close = (get_close_matches(str(value), known, n=1, cutoff=0.4) or known)[0]
    do = f"{name}=[{close}]" if listed else f"{name}={close}"
    return ConfigError(f"{name}={value} is none of {', '.join(known)}", where=f"setting {name}", do=do)


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
    shape: MoEShape | None  # None when no asked stage depends on it
    source: Mapping[str, Any]  # its config.json

    @property
    def request(self) -> Request:
        """The carve as it was asked for, to judge its shape by."""
        return Request(dials_of(self.settings), self.settings.assemble, self.source)

    @property
    def width(self) -> int:
        """F, neurons in one FFN of the source."""
        return self.request.width

    @property
    def uses(self) -> Uses:
        """The results that the stages read of each other."""
        return find_uses(self.settings, self.shape, self.width)


def validate(settings: Settings) -> Checked:
    """Check the settings against each other, the source model, the data and the disk.

    Raises:
        InvalidSettingsError: with every error found.
    """
    if errors := find_errors(settings):
        raise InvalidSettingsError(errors)
    checked = Checked(settings, None, read_source_config(settings.model))
    if not _carves(_wanted(settings)):
        return checked
    return replace(checked, shape=resolve_shape(checked.request.dials, checked.width))


def find_errors(settings: Settings, doubtful: Set[str] = frozenset()) -> list[UserError]:
    """Every error in the settings.

    Args:
        settings: all of them.
        doubtful: first words of settings that could not be read and are still at their defaults. Checks that depend on
            them are left out, since their errors would be about defaults that the user did not choose.
    """
    if unusable := [*text_errors(settings)]:
        return [*unusable]
    wanted = _wanted(settings)
    errors: list[UserError] = [*_stage_errors(settings), *field_errors(settings), *_name_errors(settings)]
    errors += _output_errors(settings.output_dir)
    sound = not errors and doubtful <= groups().keys() - {"model", "assemble", *OVERLAYS}
    errors += contradictions(settings)
    if "data" not in doubtful:
        errors += check_data(settings.data, heldout=any(stage.reads_heldout for stage in wanted))
    if "store" not in doubtful:
        errors += _store_errors(settings.store)
    source = None
    if "model" not in doubtful:
        source_faults = check_source(settings.model)
        errors += source_faults
        source = None if source_faults else read_source_config(settings.model)
    if source is not None and "data" not in doubtful:
        errors += check_length(settings.data, source)
    if source is not None:
        errors += map_errors(settings, source)
    if source is not None and sound and _carves(wanted):
        request = Request(dials_of(settings), settings.assemble, source)
        shape = resolve_shape(request.dials, request.width)
        errors += _carve_errors(request, shape, settings.model.label)
        warn_of_unread(settings, shape, request.width, clusters=involves(settings, "cluster"))
    else:
        warn_of_unread(settings)
    return errors


def dials_of(settings: Settings) -> ShapeRequest:
    """The dials of the shape."""
    dials = settings.experts, settings.n, settings.top_k, settings.always_on, settings.active, settings.topology
    return ShapeRequest(*dials)


def _wanted(settings: Settings) -> tuple[Stage, ...]:
    return with_ancestors(settings.stage, find_uses(settings))


def _carves(stages: Iterable[Stage]) -> bool:
    return any("shape" in stage.nodes for stage in stages)


def _carve_errors(request: Request, shape: MoEShape, label: str) -> Iterator[UserError]:
    """A shape that the source does not allow, or that its target cannot express."""
    yield from shape_errors(request, shape, label)
    try:
        target = request.target(shape)
    except UserError as error:
        yield error
    else:
        yield from check_target(request.source, target, shape)


def _stage_errors(settings: Settings) -> Iterator[ConfigError]:
    """An unknown stage."""
    if settings.stage != ALL and settings.stage not in STAGES:
        yield unknown_choice("stage", settings.stage, [ALL, *STAGES])


def _name_errors(settings: Settings) -> Iterator[ConfigError]:
    """A label that is no plain folder name, and an unknown device."""
    label, device = settings.model.label, settings.model.device
    if not LABEL.fullmatch(label):
        shown = textwrap.shorten(label if label.isprintable() else repr(label), 100, placeholder=" ...")
        cleaned = re.sub(r"[^\w.+-]+", "_", Path(label).name).strip("._")[:64]
        what, do = f"model.label={shown} is no plain folder name", f"model.label={cleaned or 'source'}"
        yield ConfigError(what, where="setting model.label", do=do)
    if not DEVICE.fullmatch(device):
        what = f"model.device={device} is none of auto, cpu, cuda, cuda:0, cuda:1 ..."
        yield ConfigError(what, where="setting model.device", do="model.device=auto")


def _store_errors(store: StoreConfig) -> Iterator[UserError]:
    """A server that cannot be reached, or does not let us in."""
    try:
        check_store(store)
    except UserError as error:
        yield error


def _output_errors(output_dir: str) -> Iterator[ConfigError]:
    """A place where nothing can be written."""
    if not output_dir.strip():
        yield EMPTY_OUTPUT
        return
    place = nearest_existing(Path(output_dir))
    if not place.is_dir():
        yield ConfigError(f"{place} is a file, not a folder", where="setting output_dir", do="output_dir=outputs")
        return
    try:
        # Really writing tells more than the permission bits: root, read-only mounts, kernel file systems.
        with TemporaryFile(dir=place):
            pass
    except OSError as error:
        what = f"cannot write to {place}: {error.strerror}"
        yield ConfigError(what, where="setting output_dir", do="output_dir=outputs")
