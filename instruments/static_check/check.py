"""static_check: where training code loses precision, found without running it."""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from instruments.durable import whole_file
from instruments.errors import ConfigError, check_output, exit_code, say
from instruments.static_check.definitions import find_definitions
from instruments.static_check.source import UNREADABLE, Finding, Source, read_source, unreadable
from instruments.static_check.state import Report
from instruments.static_check.walk import walk_file


@dataclass(frozen=True)
class StaticReport:
    """What was found, in the order of files and lines."""

    files: int
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0 nothing found, 1 findings, 2 a file could not be checked."""
        unreadable = any(finding.code == UNREADABLE for finding in self.findings)
        return 2 if unreadable else int(bool(self.findings))


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
    try:
        report = Report(source, find_definitions(source.tree), device)
        walk_file(report)
    except RecursionError:
        return {unreadable(path, 1, "is nested too deeply to be checked")}
    return report.findings


def main(words: Sequence[str] | None = None) -> int:
    """Do what the command line says; returns the exit code.

    0 nothing found, 1 findings, 2 a file does not parse or the command line is wrong, 130 interrupted.
    """
    parser = argparse.ArgumentParser(prog="python -m pipeline.static_check", description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="files, or folders of Python code")
    parser.add_argument("--device", default="cuda", help="of autocast where a file does not say (default: cuda)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the findings as JSON")
    wanted = parser.parse_args(words)
    return exit_code(lambda: _run(wanted))


def _run(wanted: argparse.Namespace) -> int:
    if wanted.json:
        check_output(wanted.json)
    report = static_check(wanted.paths, device=wanted.device)
    say(describe(report))
    if wanted.json:
        records = [finding.record() for finding in report.findings]
        with whole_file(wanted.json) as unfinished:
            unfinished.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    sys.stdout.flush()
    return report.exit_code


def describe(report: StaticReport) -> str:
    """Every finding, and how many there are."""
    lines = [*map(str, report.findings), f"{report.files:,} files checked, {len(report.findings):,} findings"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
