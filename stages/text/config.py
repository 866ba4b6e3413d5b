"""Settings of the text."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from instruments.errors import ConfigError, DataError, UserError

KINDS = ("python_stdlib", "text", "hub", "mixture")
# The standard library in tables, logs and errors.
STDLIB = "the Python standard library"
# Settings that the sources of a mixture do not take from `data`.
NOT_SHARED = ("path", "name", "subset", "revision", "heldout_split")


@dataclass
class SourceConfig:
    """One source of a mixture; fields that are None take the value from `data`, unless a mixture ignores it."""

    # Share of the tokens.
    share: float = field(default=1.0, metadata={"above": 0, "maximum": 1})
    path: str | None = None
    name: str | None = None
    python_stdlib: bool = False
    subset: str | None = field(default=None, metadata={"needs": {"name": True}})
    revision: str | None = field(default=None, metadata={"needs": {"name": True}})
    split: str | None = field(default=None, metadata={"needs": {"name": True}})
    heldout_split: str | None = field(default=None, metadata={"needs": {"name": True}})
    text_column: str | None = field(default=None, metadata={"needs": {"python_stdlib": False}})
    messages_column: str | None = field(default=None, metadata={"needs": {"python_stdlib": False}})
    packing: str | None = field(default=None, metadata={"choices": ("packed", "single")})
    labels: str | None = field(default=None, metadata={"choices": ("full_sequence", "completion")})
    separator: str | None = field(default=None, metadata={"choices": ("eos", "blank_line")})
    heldout_share: float | None = field(default=None, metadata={"needs": {"heldout_split": None}})


@dataclass
class DataConfig:
    """Sources of the text, and its tokenization; explained in conf/data."""

    kind: str = field(default="python_stdlib", metadata={"choices": KINDS})
    path: str | None = field(default=None, metadata={"needs": {"kind": "text"}})
    heldout_path: str | None = field(default=None, metadata={"needs": {"kind": ("text", "mixture")}})
    name: str | None = field(default=None, metadata={"needs": {"kind": "hub"}})
    subset: str | None = field(default=None, metadata={"needs": {"kind": "hub"}})
    revision: str | None = field(default=None, metadata={"needs": {"kind": "hub"}})
    split: str = field(default="train", metadata={"needs": {"kind": ("hub", "mixture")}})
    heldout_split: str | None = field(default=None, metadata={"needs": {"kind": "hub"}})
    sources: list[SourceConfig] = field(default_factory=list, metadata={"needs": {"kind": "mixture"}})
    text_column: str = field(default="text", metadata={"needs": {"kind": ("text", "hub", "mixture")}})
    messages_column: str = field(default="messages", metadata={"needs": {"kind": ("text", "hub", "mixture")}})
    packing: str = field(default="packed", metadata={"choices": ("packed", "single")})
    labels: str = field(default="full_sequence", metadata={"choices": ("full_sequence", "completion", "generated")})
    max_new_tokens: int = field(default=64, metadata={"needs": {"labels": "generated"}, "minimum": 1})
    temperature: float = field(default=0.0, metadata={"needs": {"labels": "generated"}, "minimum": 0})
    prompt_tokens: int = field(default=32, metadata={"needs": {"labels": "generated"}, "minimum": 1})
    separator: str = field(default="eos", metadata={"choices": ("eos", "blank_line")})
    max_length: int = field(default=256, metadata={"minimum": 2})
    tokens: int = 65536
    sample_tokens: int | None = 16384
    heldout_tokens: int = 32768
    heldout_share: float = field(default=0.1, metadata={"needs": {"heldout_path": None, "heldout_split": None}})

    @property
    def mixed(self) -> dict[str, SourceConfig]:
        """The sources of a mixture by the names of their settings; {} for other kinds."""
        named = {f"data.sources.{number}": source for number, source in enumerate(self.sources)}
        return named if self.kind == "mixture" else {}

    @property
    def named_heldout(self) -> str | None:
        """The setting that names the held-out text; None: a share of the documents is held out."""
        name = {"text": "heldout_path", "hub": "heldout_split", "mixture": "heldout_path"}.get(self.kind)
        return name if name and getattr(self, name) is not None else None


def sampled(data: DataConfig) -> DataConfig:
    """The settings for stages that read only the first `sample_tokens` of the text."""
    return replace(data, tokens=min(data.tokens, data.sample_tokens or data.tokens), sample_tokens=None)


def calibration_only(data: DataConfig) -> DataConfig:
    """The settings that affect the calibration text; all others are reset.

    Of held-out text only the documents that it excludes affect it, which `calibration_cache_key` covers.
    """
    share = 0.0 if data.named_heldout else data.heldout_share
    unread: dict[str, Any] = dict.fromkeys(("sample_tokens", "heldout_path", "heldout_split"))
    return replace(data, heldout_tokens=0, heldout_share=share, **unread)


def check_settings(data: DataConfig) -> list[UserError]:
    """Settings that contradict each other; the fields' metadata check single values."""
    return [ConfigError(what, do=do) for what, do in _list_contradictions(data)]


PLAIN_STDLIB = "data.labels=completion needs conversations, and the standard library is plain text"


def _list_contradictions(data: DataConfig) -> Iterator[tuple[str, str]]:
    """Fault and remedy of each contradiction."""
    for name in ("tokens", "sample_tokens", "heldout_tokens"):
        tokens, least = getattr(data, name), max(2, data.max_length)
        if tokens is not None and tokens < least:
            what = f"data.{name}={tokens} is less than one sequence of data.max_length={data.max_length} tokens"
            yield what, f"data.{name}={least}"
    yield from _heldout_contradictions(data, "data")
    longest = data.prompt_tokens + data.max_new_tokens
    if data.labels == "generated" and longest > data.max_length:
        parts = f"data.prompt_tokens={data.prompt_tokens} and data.max_new_tokens={data.max_new_tokens}"
        yield f"{parts} do not fit into data.max_length={data.max_length}", f"data.max_length={longest}"
    same = data.path and data.heldout_path and Path(data.path).resolve() == Path(data.heldout_path).resolve()
    if data.kind == "python_stdlib" and data.labels == "completion":
        yield PLAIN_STDLIB, "data.labels=full_sequence"
    elif data.kind == "text" and not data.path:
        yield "data.kind=text reads local files, and none is named", "data.path=FILE_OR_FOLDER"
    elif data.kind == "text" and same:
        yield f"data.heldout_path and data.path are the same: {data.path}", "data.heldout_path=null"
    elif data.kind == "hub" and not data.name:
        yield "data.kind=hub reads a dataset, and none is named", "data.name=Salesforce/wikitext"


def _heldout_contradictions(data: DataConfig, place: str) -> Iterator[tuple[str, str]]:
    """Settings that hold out nothing, everything or the calibration text itself; `place` is `data`, or a source."""
    if not 0 < data.heldout_share < 1:
        what = f"{place}.heldout_share={data.heldout_share} is not between 0 and 1, both excluded"
        yield what, f"{place}.heldout_share=0.1"
    if data.kind == "hub" and data.split == data.heldout_split:
        yield f"{place}.heldout_split and {place}.split are the same: {data.split}", f"{place}.heldout_split=null"


EXAMPLE = "'data.sources=[{path:FILE_OR_FOLDER,share:0.5},{name:allenai/c4,subset:en,share:0.5}]'"


@dataclass(frozen=True)
class Source:
    """One part of a mixture."""

    name: str
    share: float
    data: DataConfig  # with its number of tokens, at least one sequence


def list_sources(data: DataConfig) -> list[Source]:
    """The sources of a mixture; [] for other kinds.

    With `data.heldout_path` no source holds anything out; `load_text` then leaves out copies of held-out documents.
    """
    own_only: dict[str, Any] = dict.fromkeys(NOT_SHARED)  # not taken from `data`
    found = []
    for settings in data.sources:
        own = asdict(settings)
        stdlib, share = own.pop("python_stdlib"), own.pop("share")
        said = {key: value for key, value in own.items() if value is not None}
        tokens, heldout_tokens = (
            max(round(share * wanted), data.max_length) if wanted else 0
            for wanted in (data.tokens, data.heldout_tokens)
        )
        kind = "python_stdlib" if stdlib else "hub" if settings.path is None else "text"
        part = replace(data, kind=kind, sources=[], **own_only | said)
        part = replace(part, tokens=tokens, heldout_tokens=heldout_tokens)
        if data.heldout_path is not None:
            part = replace(part, heldout_path=None, heldout_split=None, heldout_share=0.0)
        found.append(Source(STDLIB if stdlib else settings.path or str(settings.name), share, part))
    return found


# Settings of a source in the text of errors.
_OF_SOURCE = re.compile(rf"(?<![^ ])data\.(?=(?:{'|'.join(spec.name for spec in fields(SourceConfig))})\b)")


def name_source(error: UserError, number: int) -> UserError:
    """The error of one source of a mixture, with the source's settings instead of `data.path`, `data.labels` ...

    Advice to read files (`data=text`), the hub (`data=hub`) or the standard library says so for this source.
    """
    place = f"data.sources.{number}."

    def named(text: str) -> str:
        text = text.replace("data=text ", f"{place}name=null ").replace("data=hub ", f"{place}path=null ")
        text = text.replace("data=python_stdlib", f"{place}name=null {place}python_stdlib=true")
        return _OF_SOURCE.sub(place, text)

    return type(error)(error.what, where=named(error.where), do=named(error.do))


@contextmanager
def named_source(number: int) -> Iterator[None]:
    """Raise DataErrors of one source of a mixture with the names of its settings."""
    try:
        yield
    except DataError as error:
        raise name_source(error, number) from error


def _source_contradictions(source: SourceConfig, place: str, labels: str) -> Iterator[tuple[str, str]]:
    """Fault and remedy of a source that is nothing, several things, or the standard library with `labels` of chats."""
    named = [name for name in ("path", "name", "python_stdlib") if getattr(source, name) not in (None, False)]
    if not named:
        yield f"{place} names no path and no dataset", f"{place}.path=FILE"
    elif len(named) > 1:
        nothing = (f"{place}.{name}={'false' if name == 'python_stdlib' else 'null'}" for name in named[1:])
        yield f"{place} has {' and '.join(named)}, and a source is one of them", " ".join(nothing)
    elif source.python_stdlib and labels == "completion":
        yield PLAIN_STDLIB, f"{place}.labels=full_sequence"


def mixture_errors(data: DataConfig) -> Iterator[ConfigError]:
    """Faults of the settings of the sources."""
    if not data.sources:
        yield ConfigError("data.kind=mixture reads several sources, and none is named", do=EXAMPLE)
    if data.labels == "generated":
        what = "data.labels=generated reads one source, and data.kind=mixture several"
        yield ConfigError(what, do="data.labels=full_sequence")
    for number, source in enumerate(data.sources):
        place = f"data.sources.{number}"
        for what, do in _source_contradictions(source, place, source.labels or data.labels):
            yield ConfigError(what, where=f"setting {place}", do=do)
    total = sum(source.share for source in data.sources)
    if data.sources and not abs(total - 1) <= 1e-6:  # also true for NaN
        shares = ", ".join(f"{source.share:g}" for source in data.sources)
        what = f"the shares of data.sources are {shares}: their sum is {total:.6g}, not 1"
        parts = [source.share / total if 0 < total < math.inf else 1 / len(data.sources) for source in data.sources]
        do = " ".join(f"data.sources.{number}.share={part:.6g}" for number, part in enumerate(parts))
        yield ConfigError(what, where="setting data.sources", do=do)
    elif data.heldout_path is None:
        for number, part in enumerate(list_sources(data)):
            for what, do in _heldout_contradictions(part.data, f"data.sources.{number}"):
                yield ConfigError(what, do=do)


def check_length(data: DataConfig, source: Mapping[str, Any]) -> list[UserError]:
    """An error if sequences are longer than the model allows; `source` is its config.json."""
    longest = longest_sequence(source)
    if longest is None or data.max_length <= longest:
        return []
    return [
        ConfigError(
            f"data.max_length={data.max_length} is longer than the model's longest sequence, {longest} tokens",
            where="setting data.max_length; max_position_embeddings of the model's config.json",
            do=f"data.max_length={longest}",
        )
    ]


def longest_sequence(source: Mapping[str, Any]) -> int | None:
    """Longest sequence of a model in tokens by its config.json, with RoPE scaling; None: unknown."""
    positions = _read_size(source, "max_position_embeddings")
    if positions is None:
        return None
    scaling = source.get("rope_scaling") or source.get("rope_parameters")
    scaling = scaling if isinstance(scaling, Mapping) else {}
    original = _read_size(scaling, "original_max_position_embeddings") or positions
    return max(int(positions), int((_read_size(scaling, "factor") or 1) * original))


def _read_size(source: Mapping[str, Any], name: str) -> float | None:
    """A positive number of a config.json, which is not trusted; None for other values."""
    value = source.get(name)
    return value if isinstance(value, int | float) and 0 < value < 2**63 else None
