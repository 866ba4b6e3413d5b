"""What every stage gets from the pipeline, and what it gives back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stages.artifacts.workers import ALONE, Workers


@dataclass(frozen=True)
class Job:
    """One run of one stage.

    `out` is a private folder, published whole when the stage returns; `scratch` belongs to the same fingerprint and
    survives a kill, for stages that can go on where they stopped.
    """

    parents: Mapping[str, Path]
    out: Path
    scratch: Path
    fingerprint: str = ""
    workers: Workers = ALONE
    fresh: bool = False  # what earlier runs left elsewhere (a store) is to be forgotten


@dataclass(frozen=True)
class Table:
    """What a stage found, for the console and the run report."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    notes: Sequence[str] = field(default=())
