"""Mixtures: text of several sources, each with its share of the tokens."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from instruments.errors import ConfigError
from stages.text.config import FOREIGN_FIELDS, DataConfig

EXAMPLE = "'data.sources=[{path:FILE_OR_FOLDER,share:0.5},{name:allenai/c4,subset:en,share:0.5}]'"


@dataclass(frozen=True)
class Source:
    """One part of a mixture."""

    name: str
    share: float
    data: DataConfig  # with its number of tokens, at least one sequence


def list_sources(data: DataConfig) -> list[Source]:
    """The sources of a mixture; [] for other kinds. Sources with a path read local files, the others the hub.

    With `data.heldout_path` no source holds anything out; `load_text` then leaves out copies of held-out documents.
    """
    own_only: dict[str, Any] = dict.fromkeys(FOREIGN_FIELDS["mixture"])  # not taken from `data`
    found = []
    for settings in data.sources:
        said = {key: value for key, value in asdict(settings).items() if value is not None and key != "share"}
        tokens, heldout_tokens = (
            max(round(settings.share * wanted), data.max_length) if wanted else 0
            for wanted in (data.tokens, data.heldout_tokens)
        )
        part = replace(data, kind="hub" if settings.path is None else "text", sources=[], **own_only | said)
        part = replace(part, tokens=tokens, heldout_tokens=heldout_tokens)
        if data.heldout_path is not None:
            part = replace(part, heldout_path=None, heldout_split=None, heldout_share=0.0)
        found.append(Source(settings.path or str(settings.name), settings.share, part))
    return found


def mixture_errors(data: DataConfig) -> Iterator[ConfigError]:
    """Faults of the settings of the sources."""
    if not data.sources:
        yield ConfigError("data.kind=mixture reads several sources, and none is named", do=EXAMPLE)
    if data.labels == "generated":
        what = "data.labels=generated reads one source, and data.kind=mixture several"
        yield ConfigError(what, do="data.labels=full_sequence")
    for number, source in enumerate(data.sources):
        place = f"data.sources.{number}"
        if source.path is None and source.name is None:
            yield ConfigError(
                f"{place} names no path and no dataset", where=f"setting {place}", do=f"{place}.path=FILE"
            )
        elif source.path is not None and source.name is not None:
            yield ConfigError(
                f"{place} names both a path and a dataset", where=f"setting {place}", do=f"{place}.name=null"
            )
    total = sum(source.share for source in data.sources)
    if data.sources and not abs(total - 1) <= 1e-6:  # also true for NaN
        shares = ", ".join(f"{source.share:g}" for source in data.sources)
        what = f"the shares of data.sources are {shares}: their sum is {total:.6g}, not 1"
        parts = [source.share / total if 0 < total < math.inf else 1 / len(data.sources) for source in data.sources]
        do = " ".join(f"data.sources.{number}.share={part:.6g}" for number, part in enumerate(parts))
        yield ConfigError(what, where="setting data.sources", do=do)


def interleave_shares(sizes: Sequence[Sequence[int]], shares: Sequence[float]) -> list[tuple[int, int]]:
    """Order the sequences of several sources so that every prefix holds the sources by their shares.

    Args:
        sizes: tokens of each sequence, by source.
        shares: of the sources.
    Returns:
        Source and number of each sequence; the numbers of one source ascend.
    """
    # Sort by the position of a sequence's middle within its source, divided by the share.
    places = []
    for source, (lengths, share) in enumerate(zip(sizes, shares, strict=True)):
        end = 0
        for number, length in enumerate(lengths):
            places.append(((end + length / 2) / share, source, number))
            end += length
    return [(source, number) for _, source, number in sorted(places)]
