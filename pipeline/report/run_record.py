"""The stages of a run in machine-readable form: `stages.json` in the run folder."""

import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from instruments.durable import whole_file
from instruments.errors import ContractError
from pipeline.artifacts import LARGEST, UNREADABLE

FILE = "stages.json"
PACKAGES = ("torch", "transformers", "safetensors", "numpy", "scikit-learn", "umap-learn", "hydra-core")


@dataclass(frozen=True)
class StageRun:
    """One stage in one run; a stage kept from an earlier run has no figures."""

    stage: str
    fingerprint: str
    seconds: float | None = None
    peak_bytes: int | None = None


@dataclass
class RunRecord:
    """The command, the installed versions, and the stages in the order in which they finished."""

    overrides: Sequence[str]
    versions: dict[str, str]
    stages: list[StageRun] = field(default_factory=list)

    @classmethod
    def start(cls, overrides: Sequence[str]) -> "RunRecord":
        """The record of a run that has finished no stage yet."""
        return cls(list(overrides), installed_versions())

    def write(self, folder: Path) -> None:
        """Write `stages.json` atomically."""
        with whole_file(folder / FILE) as unfinished:
            unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def read_run_record(folder: Path) -> RunRecord:
    """Read `stages.json`. Raises ContractError: missing or damaged."""
    try:
        values = json.loads((folder / FILE).read_text(encoding="utf-8"))
        stages = [_read_stage_run(**run) for run in values.pop("stages")]
        return RunRecord([*map(str, values.pop("overrides"))], dict(values.pop("versions")), stages, **values)
    except UNREADABLE as error:
        do = "name a folder under outputs/runs, or latest"
        raise ContractError(f"no record of a run: {error}", where=str(folder), do=do) from error


def _read_stage_run(
    stage: str, fingerprint: str, seconds: float | None = None, peak_bytes: int | None = None
) -> StageRun:
    figures = [figure for figure in (seconds, peak_bytes) if figure is not None]
    if not (stage + fingerprint).isalnum() or not all(0 <= figure < LARGEST for figure in figures):
        raise ValueError("values of another type")
    return StageRun(stage, fingerprint, seconds, peak_bytes)


def read_all_records(output_dir: Path) -> Iterator[RunRecord]:
    """Every readable record, the newest run first."""
    runs = [((path.name, 0), path) for path in output_dir.glob("runs/*")]
    jobs = [
        ((path.parent.name, int(path.name)), path) for path in output_dir.glob("sweeps/*/*") if path.name.isdecimal()
    ]
    for _started, folder in sorted(runs + jobs, reverse=True):
        try:
            yield read_run_record(folder)
        except ContractError:
            continue


def installed_versions() -> dict[str, str]:
    """Versions of Python and the packages that affect results."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
