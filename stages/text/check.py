"""Checks of the text before any model is loaded: its settings, the first document of each source, its length."""

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from instruments.errors import ConfigError, DataError, UserError
from stages.text.config import KINDS, DataConfig, Split, TrainingData, list_sources
from stages.text.sources import describe_emptiness, describe_missing_template, find_template_file, read_documents

# Kind of text → the setting that it needs, and an example.
NEEDED = {
    "text": ("path", "data.path=FILE_OR_FOLDER"),
    "hub": ("name", "data.name=Salesforce/wikitext"),
    "mixture": ("sources", "'data.sources=[{path:FILE_OR_FOLDER,share:0.5},{name:allenai/c4,subset:en,share:0.5}]'"),
}


def check_data(data: DataConfig, *, heldout: bool = True) -> list[UserError]:
    """Faults of the settings; if there are none, of the first documents, without those of the hub. Reads little.

    An empty held-out split is a fault only with `heldout`.
    """
    if data.kind not in KINDS or data.max_length < 2 or not 0 <= data.heldout_share < 1:
        return []  # the fields' own checks report these
    return [*_check_settings(data)] or [*_check_first_documents(data, heldout=heldout)]


def check_training(data: TrainingData) -> list[UserError]:
    """Faults of the sources of a training's own text."""
    return [*_check_sources(data)] or [*_check_first_documents(data, heldout=False)]


def _check_settings(data: DataConfig) -> Iterator[ConfigError]:
    """Errors: settings that contradict each other; the fields' metadata check single values."""
    for name in ("tokens", "sample_tokens", "heldout_tokens"):
        tokens, least = getattr(data, name), max(2, data.max_length)
        if tokens is not None and tokens < least:
            what = f"data.{name}={tokens} is less than one sequence of data.max_length={data.max_length} tokens"
            yield ConfigError(what, where=f"setting data.{name}", do=f"data.{name}={least}")
    longest = data.prompt_tokens + data.max_new_tokens
    if data.labels == "generated" and longest > data.max_length:
        parts = f"data.prompt_tokens={data.prompt_tokens} and data.max_new_tokens={data.max_new_tokens}"
        what = f"{parts} do not fit into data.max_length={data.max_length}"
        yield ConfigError(what, where="setting data.max_length", do=f"data.max_length={longest}")
    if data.kind == "text" and data.path and data.paths:
        what, do = "data.path and data.paths both name the text", "data.path=null"
        yield ConfigError(what, where="setting data.paths", do=do)
    if data.kind in NEEDED and not (getattr(data, NEEDED[data.kind][0]) or (data.kind == "text" and data.paths)):
        name, example = NEEDED[data.kind]
        yield ConfigError(f"data.kind={data.kind} needs data.{name}", where=f"setting data.{name}", do=example)
    else:
        yield from _check_sources(data)


def _check_sources(data: DataConfig) -> Iterator[ConfigError]:
    """Errors: sources that are nothing or several things, hold out their calibration text, or have the wrong shares."""
    unset = {"path": "null", "name": "null", "python_stdlib": "false"}
    for place, settings in data.mixed.items():
        given = [name for name in unset if getattr(settings, name)]
        if len(given) != 1:
            what = f"{place} has {' and '.join(given) or 'nothing'}, and a source is one of {', '.join(unset)}"
            do = " ".join(f"{place}.{name}={unset[name]}" for name in given[1:]) or f"{place}.path=FILE_OR_FOLDER"
            yield ConfigError(what, where=f"setting {place}", do=do)
    for source in list_sources(data, "calibration"):
        if source.kind == "hub" and source.split == source.heldout_split:
            what = f"{source.place}.heldout_split and {source.place}.split are the same: {source.split}"
            where, do = f"setting {source.place}.heldout_split", f"{source.place}.heldout_split=null"
            yield ConfigError(what, where=where, do=do)
    total = sum(source.share for source in data.sources)
    if data.mixed and abs(total - 1) > 1e-6:
        what = f"the shares of {data.node}.sources add up to {total:.6g}, not 1"
        shares = {place: source.share / (total or 1) for place, source in data.mixed.items()}
        do = " ".join(f"{place}.share={share:.6g}" for place, share in shares.items())
        yield ConfigError(what, where=f"setting {data.node}.sources", do=do)


def _check_first_documents(data: DataConfig, *, heldout: bool) -> Iterator[DataError]:
    """Errors: paths and first documents that cannot be read, splits without a document."""
    splits: tuple[Split, ...] = ("calibration", "heldout") if heldout else ("calibration",)
    for source in (source for split in splits for source in list_sources(data, split)):
        if source.kind == "hub" and importlib.util.find_spec("datasets") is None:
            what, do = "reading a dataset needs the package datasets", "pip install datasets"
            yield DataError(what, where=f"{source.place}.name={source.name}", do=do)
        try:
            find_template_file(source)
            if source.kind != "hub" and next(read_documents(source), None) is None:
                yield describe_emptiness(source)
        except DataError as error:
            yield error


def check_template(data: DataConfig, folder: Path, *, heldout: bool) -> list[UserError]:
    """Errors: local text begins with a conversation, and the model's `folder` has no chat template to write it with.

    Held-out text is read last, and the setting that names a template is one of every stage.
    """
    if not (settings := folder / "tokenizer_config.json").is_file() or _has_template(folder, settings):
        return []  # a model of the hub may not be here yet
    splits: tuple[Split, ...] = ("calibration", "heldout") if heldout else ("calibration",)
    errors: list[UserError] = []
    for source in (source for split in splits for source in list_sources(data, split)):
        if source.kind != "text" or source.chat_template is not None:
            continue
        with suppress(DataError):  # `check_data` reports it
            if (first := next(read_documents(source), None)) and first.messages:
                errors.append(describe_missing_template(source, f"{first.name}, tokenizer {folder}"))
    return errors


def _has_template(folder: Path, settings: Path) -> bool:
    if any([*folder.glob("chat_template*"), *folder.glob("additional_chat_templates/*.jinja")]):
        return True
    with suppress(OSError, ValueError):
        return '"chat_template"' in settings.read_text(encoding="utf-8")
    return True  # loading the tokenizer reports the file


def check_length(data: DataConfig, source: Mapping[str, Any]) -> list[UserError]:
    """An error if sequences are longer than the model allows; `source` is its config.json."""
    longest = longest_sequence(source)
    if longest is None or data.max_length <= longest:
        return []
    what = f"data.max_length={data.max_length} is longer than the model's longest sequence, {longest} tokens"
    where = "setting data.max_length; max_position_embeddings of the model's config.json"
    return [ConfigError(what, where=where, do=f"data.max_length={longest}")]


def longest_sequence(source: Mapping[str, Any]) -> int | None:
    """Longest sequence of a model in tokens by its config.json, with RoPE scaling; None: unknown."""
    scaling = source.get("rope_scaling") or source.get("rope_parameters")
    scaling = scaling if isinstance(scaling, Mapping) else {}
    stated = [
        source.get("max_position_embeddings") or source.get("n_positions"),
        scaling.get("original_max_position_embeddings"),
    ]
    positions, original, factor = (
        size if isinstance(size, int | float) and 0 < size < 2**63 else None
        for size in (*stated, scaling.get("factor"))
    )
    return None if positions is None else int(max(positions, (factor or 1) * (original or positions)))
