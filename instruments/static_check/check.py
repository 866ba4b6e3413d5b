"""static_check: find where training code loses precision, without running it."""

import argparse
import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from instruments.errors import ConfigError, exit_code, say
from instruments.static_check.definitions import find_definitions
from instruments.static_check.source import GRADES, NOTE, UNREADABLE, Finding, Source, read_source, unreadable
from instruments.static_check.state import FileFacts
from instruments.static_check.walk import walk_file


@dataclass(frozen=True)
class StaticReport:
    """Findings, sorted by file and line."""

    files: int
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0: no findings; 1: findings; 2: a file could not be checked."""
        unreadable = any(finding.code == UNREADABLE for finding in self.findings)
        return 2 if unreadable else int(bool(self.findings))


def static_check(
    paths: Path | str | Sequence[Path | str], *, device: str = "cuda", severity: str = NOTE, exclude: Sequence[str] = ()
) -> StaticReport:
    """Check training code for mixed-precision mistakes, by its syntax tree.

    Args:
        paths: files, or folders whose `*.py` and `*.ipynb` are checked.
        device: device of autocast if a file does not name it.
        severity: lowest severity to report: note, warning, severe.
        exclude: globs of files in folders to skip, on the path or a part of it: "tests", "*/examples/*".
    Raises:
        ConfigError: a missing path, a device without autocast, or an unknown severity.
    """
    if severity not in GRADES:
        raise ConfigError(f"no severity {severity!r}", where="severity", do=f"one of {', '.join(GRADES)}")
    files = list(find_files([paths] if isinstance(paths, Path | str) else paths, exclude))
    reported = GRADES[GRADES.index(severity) :]
    findings = {finding for file in files for finding in check_file(file, device) if finding.severity in reported}
    return StaticReport(len(files), tuple(sorted(findings)))


def find_files(paths: Iterable[Path | str], exclude: Sequence[str] = ()) -> Iterator[Path]:
    """Given files, and Python files and notebooks in folders, except hidden ones. Raises ConfigError: missing path."""
    for path in map(Path, paths):
        if not path.exists():
            raise ConfigError(f"there is no {path}", where="paths", do="name files or folders of Python code")
        if not path.is_dir():
            yield path
            continue
        for file in sorted(path.rglob("*")):
            inside = file.relative_to(path)
            hidden = any(part.startswith(".") for part in inside.parts)
            left_out = any(fnmatch(word, glob) for word in (str(inside), *inside.parts) for glob in exclude)
            if file.suffix in {".py", ".ipynb"} and file.is_file() and not hidden and not left_out:
                yield file


def check_file(path: Path, device: str) -> set[Finding]:
    """All findings in a file."""
    collects = gc.isenabled()
    gc.disable()  # a tree has no cycles, and looking for them takes longer than to parse it
    try:
        source = read_source(path)
        if not isinstance(source, Source):
            return {source}
        facts = FileFacts(source, find_definitions(source.tree), device)
        walk_file(facts)
    except RecursionError:
        return {unreadable(path, 1, "is nested too deeply to be checked")}
    finally:
        if collects:
            gc.enable()
    return facts.findings | set(source.unread)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    0: no findings; 1: findings; 2: a file could not be checked, or wrong command line; 130: interrupted.
    """
    parser = argparse.ArgumentParser(prog="python -m pipeline static_check", description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="files, or folders of Python code")
    parser.add_argument("--severity", choices=GRADES, default=NOTE, help="lowest grade reported (default: note)")
    parser.add_argument("--exclude", action="append", default=[], metavar="GLOB", help="files or folders to skip")
    parser.add_argument("--device", default="cuda", help="device of autocast if a file names none (default: cuda)")
    wanted = parser.parse_args(words)

    def run() -> int:
        report = static_check(wanted.paths, device=wanted.device, severity=wanted.severity, exclude=wanted.exclude)
        say("".join(f"{finding}\n" for finding in report.findings))
        say(f"{report.files:,} files checked, {len(report.findings):,} findings\n")
        return report.exit_code

    return exit_code(run)
