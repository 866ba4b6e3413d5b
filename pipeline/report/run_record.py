"""What a run did, for programs to read: `stages.json` in its folder."""

import json
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from instruments.errors import ContractError

FILE = "stages.json"
SHORT = 16  # letters of a fingerprint in the name of its folder
PACKAGES = ("torch", "transformers", "safetensors", "numpy", "scikit-learn", "umap-learn", "hydra-core")
# A stage in the report.md of a run from before there was a stages.json.
HEADLINE = re.compile(r"^## (\w+)\n\n(?:kept|([\d.,]+) s, peak memory ([\d.,]+) MiB), .*/(\w+)$", re.MULTILINE)


@dataclass(frozen=True)
class StageRun:
    """One stage in one run; one that was kept from an earlier run has no figures."""

    stage: str
    fingerprint: str
    seconds: float | None = None
    peak_bytes: int | None = None


@dataclass
class RunRecord:
    """The command, what it ran with, and its stages in the order they were done with."""

    overrides: Sequence[str]
    versions: dict[str, str]
    stages: list[StageRun] = field(default_factory=list)

    @classmethod
    def start(cls, overrides: Sequence[str]) -> "RunRecord":
        """A run of which no stage is done."""
        return cls(list(overrides), installed_versions())

    def write(self, folder: Path) -> None:
        """Write `stages.json`; whoever reads meanwhile finds the old one or the new one whole."""
        path = folder / FILE
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        new.replace(path)

    def find(self, stage: str) -> StageRun | None:
        """The run of a stage; None where this run had no need of it."""
        return next((run for run in self.stages if run.stage == stage), None)


def read_run_record(folder: Path) -> RunRecord:
    """What a run's folder says of it; of an old run, what its report.md says.

    Raises:
        ContractError: neither can be read.
    """
    try:
        if not (folder / FILE).exists():
            return _read_markdown((folder / "report.md").read_text(encoding="utf-8"))
        values = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return RunRecord(**{**values, "stages": [StageRun(**run) for run in values["stages"]]})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ContractError(
            f"no record of a run: {error}", where=str(folder), do="name a folder under outputs/runs, or latest"
        ) from error


def _read_markdown(report: str) -> RunRecord:
    command = re.search(r"^    python -m pipeline ?(.*)$", report, re.MULTILINE)
    stages = [
        StageRun(stage, fingerprint, _number(seconds), int(mib * 2**20) if (mib := _number(peak)) else None)
        for stage, seconds, peak, fingerprint in HEADLINE.findall(report)
        if len(fingerprint) == SHORT
    ]
    return RunRecord(command[1].split() if command else [], {}, stages)


def _number(words: str) -> float | None:
    return float(words.replace(",", "")) if words else None


def installed_versions() -> dict[str, str]:
    """Python and the packages that decide results."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
