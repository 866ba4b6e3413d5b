"""static_check: where training code loses precision, found without running it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from instruments.errors import ConfigError
from instruments.static_check.definitions import find_definitions
from instruments.static_check.rules import Finding
from instruments.static_check.source import Source, read_source
from instruments.static_check.state import Report
from instruments.static_check.walk import walk_file

UNREADABLE = "LP001"


@dataclass(frozen=True)
class StaticReport:
    """What was found, in the order of files and lines."""

    files: int
    findings: tuple[Finding, ...]

    @property
    def unreadable(self) -> tuple[Finding, ...]:
        """Files that do not parse."""
        return tuple(finding for finding in self.findings if finding.code == UNREADABLE)

    @property
    def exit_code(self) -> int:
        """0 nothing found, 1 findings, 2 a file could not be checked."""
        return 2 if self.unreadable else int(bool(self.findings))


def static_check(paths: Path | str | Sequence[Path | str], *, device: str = "cuda") -> StaticReport:
    """Check training code for mixed-precision mistakes, by its syntax tree.

    Args:
        paths: files, or folders whose `*.py` are checked.
        device: that autocast is for, where a file does not say; what it does to each operation is asked of torch.
    Raises:
        ConfigError: a path that is not there, a device without autocast.
    """
    files = list(find_files([paths] if isinstance(paths, Path | str) else paths))
    findings = sorted({finding for file in files for finding in check_file(file, device)})
    return StaticReport(len(files), tuple(findings))


def find_files(paths: Iterable[Path | str]) -> Iterable[Path]:
    """Files as they are, and the Python files below folders; hidden folders are left out. Raises ConfigError."""
    for path in map(Path, paths):
        if not path.exists():
            raise ConfigError(f"there is no {path}", where="paths", do="name files or folders of Python code")
        if path.is_dir():
            below = (file for file in sorted(path.rglob("*.py")) if file.is_file())
            yield from (
                file for file in below if not any(part.startswith(".") for part in file.relative_to(path).parts)
            )
        else:
            yield path


def check_file(path: Path, device: str) -> set[Finding]:
    """All findings in a file."""
    source = read_source(path)
    if not isinstance(source, Source):
        return {source}
    report = Report(source, find_definitions(source.tree), device)
    walk_file(report)
    return report.findings
