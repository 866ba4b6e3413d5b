"""Settings of the text."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

KINDS = ("python_stdlib", "text", "hub", "mixture")
# Value of `chat_template`: roles and contents in plain text.
PLAIN_TEMPLATE = "plain"
# Settings of files and of the hub; held-out text may be in files, too.
_OF_RECORDS = {"needs": {"kind": ("text", "hub", "mixture")}, "or": {"heldout_path": True}}
# Settings that the sources of a mixture do not take from `data`.
NOT_SHARED = ("path", "name", "subset", "revision", "heldout_split")

HELDOUT_LIMITS = {"minimum": 0, "maximum": 0.99}

Split = Literal["calibration", "heldout"]


@dataclass
class SourceConfig:
    """One source of a mixture; fields that are None take the value from `data`, unless a mixture ignores it."""

    # Share of the tokens.
    share: float = field(default=1.0, metadata={"above": 0, "maximum": 1})
    path: str | None = field(default=None, metadata={"fingerprint": False})
    name: str | None = None
    python_stdlib: bool = False
    subset: str | None = field(default=None, metadata={"needs": {"name": True}})
    revision: str | None = field(default=None, metadata={"needs": {"name": True}})
    split: str | None = field(default=None, metadata={"needs": {"name": True}})
    heldout_split: str | None = field(default=None, metadata={"needs": {"name": True}})
    text_column: str | None = field(default=None, metadata={"needs": {"python_stdlib": False}})
    messages_column: str | None = field(default=None, metadata={"needs": {"python_stdlib": False}})
    chat_template: str | None = field(default=None, metadata={"needs": {"python_stdlib": False}})
    ignored_fields: list[str] | None = field(default=None, metadata={"needs": {"python_stdlib": False}})
    packing: str | None = field(default=None, metadata={"choices": ("packed", "single")})
    labels: str | None = field(default=None, metadata={"choices": ("full_sequence", "completion")})
    separator: str | None = field(default=None, metadata={"choices": ("eos", "blank_line")})
    heldout_share: float | None = field(default=None, metadata={"needs": {"heldout_split": None}, **HELDOUT_LIMITS})

    @property
    def kind(self) -> str:
        """`DataConfig.kind` of this source alone."""
        return "python_stdlib" if self.python_stdlib else "text" if self.path else "hub"


@dataclass
class DataConfig:
    """Sources of the text, and its tokenization; explained in conf/data."""

    node: ClassVar[str] = "data"  # has the setting `sources`, for errors

    kind: str = field(default="python_stdlib", metadata={"choices": KINDS})
    # Of files, the content is in a result's fingerprint, wherever they are.
    path: str | None = field(default=None, metadata={"needs": {"kind": "text"}, "fingerprint": False})
    paths: list[str] = field(default_factory=list, metadata={"needs": {"kind": "text"}, "fingerprint": False})
    heldout_path: str | None = field(default=None, metadata={"fingerprint": False})
    name: str | None = field(default=None, metadata={"needs": {"kind": "hub"}})
    subset: str | None = field(default=None, metadata={"needs": {"kind": "hub"}})
    revision: str | None = field(default=None, metadata={"needs": {"kind": "hub"}})
    split: str = field(default="train", metadata={"needs": {"kind": ("hub", "mixture")}})
    heldout_split: str | None = field(default=None, metadata={"needs": {"kind": "hub"}})
    sources: list[SourceConfig] = field(default_factory=list, metadata={"needs": {"kind": "mixture"}})
    text_column: str = field(default="text", metadata=_OF_RECORDS)
    messages_column: str = field(default="messages", metadata=_OF_RECORDS)
    chat_template: str | None = field(default=None, metadata=_OF_RECORDS)
    ignored_fields: list[str] = field(default_factory=list, metadata=_OF_RECORDS)
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
    heldout_share: float = field(default=0.1, metadata={"needs": {"heldout_split": None}, **HELDOUT_LIMITS})

    @property
    def mixed(self) -> dict[str, SourceConfig]:
        """The sources of a mixture by the names of their settings; {} for other kinds."""
        named = {f"{self.node}.sources.{number}": source for number, source in enumerate(self.sources)}
        return named if self.kind == "mixture" else {}


@dataclass
class TrainingData(DataConfig):
    """Text that only stage train reads."""

    node: ClassVar[str] = "train"


@dataclass
class Source(DataConfig):
    """One source of one split, with all its settings.

    `tokens` is the number of tokens of this split. `heldout_share` is 0 or 1 where `heldout_split` names a split of the
    dataset, or `heldout_path` the held-out text: then all documents of the source are in this split.
    """

    role: Split = "calibration"
    place: str = "data"  # node of its settings, for errors
    share: float = 1.0  # of the tokens
    # Records, as far as they have been read, whose text is not in the columns that are read, with their columns.
    without_text: list[str] = field(default_factory=list, compare=False)

    @property
    def use(self) -> str:
        """What its text is for, in words."""
        return "training" if self.place.startswith(f"{TrainingData.node}.") else self.role

    @property
    def title(self) -> str:
        """The source in tables, logs and errors."""
        titles = {
            "text": ", ".join(self.paths or [str(self.path)]),
            "hub": ", ".join(filter(None, [self.name, self.subset])) + f"[{self.split}]",
        }
        return titles.get(self.kind, "the Python standard library")

    @property
    def path_setting(self) -> str:
        """The setting that names the local files."""
        own = f"{self.place}.{'paths' if self.paths else 'path'}"
        return own if self.heldout_path is None else "data.heldout_path"


def list_sources(data: DataConfig, role: Split) -> list[Source]:
    """The sources of one split, with their settings; one, unless `data` is a mixture."""
    tokens = data.tokens if role == "calibration" else data.heldout_tokens
    shared: dict[str, Any] = vars(data) | {"sources": [], "tokens": tokens, "role": role}
    if data.heldout_path is not None and role == "heldout":
        return [Source(**shared | {"kind": "text", "path": data.heldout_path, "paths": [], "heldout_share": 1.0})]
    shared["heldout_path"] = None
    sources = [] if data.kind == "mixture" else [Source(**shared)]
    for place, settings in data.mixed.items():
        own = {name: value for name, value in vars(settings).items() if value is not None}
        least = data.max_length if own.get("packing", data.packing) == "single" else 2  # one whole sequence
        own |= {"kind": settings.kind, "place": place, "tokens": max(round(settings.share * tokens), least)}
        del own["python_stdlib"]
        sources.append(Source(**shared | dict.fromkeys(NOT_SHARED) | {"paths": []} | own))
    for source in sources:
        if source.kind == "hub" and source.heldout_split is not None:
            source.heldout_share = float(role == "heldout")
            source.split = source.heldout_split if role == "heldout" else source.split
    if role == "calibration":  # a document that one source holds out by its content is read from none
        chosen = [source for source in sources if source.kind != "python_stdlib" and source.heldout_share]
        largest = max((source.heldout_share for source in chosen), default=0.0)
        for source in chosen:
            source.heldout_share = largest
    return sources


def sampled(data: DataConfig) -> DataConfig:
    """The settings for stages that read only the first `sample_tokens` of the text."""
    return replace(data, tokens=min(data.tokens, data.sample_tokens or data.tokens), sample_tokens=None)


def calibration_only(data: DataConfig) -> DataConfig:
    """The settings that affect the calibration text; all others are reset.

    Of held-out text only the documents that it excludes affect it, which `calibration_cache_key` covers.
    """
    share = 0.0 if data.kind == "hub" and data.heldout_split is not None else data.heldout_share
    unread: dict[str, Any] = dict.fromkeys(("sample_tokens", "heldout_path", "heldout_split"))
    return replace(data, heldout_tokens=0, heldout_share=share, **unread)
