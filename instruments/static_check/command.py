"""`python -m pipeline.static_check PATH ...`: where training code loses precision, found without running it."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from instruments.command_line import check_output, exit_code
from instruments.static_check.check import StaticReport, static_check


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
    sys.stdout.write(describe(report))
    if wanted.json:
        records = [finding.record() for finding in report.findings]
        wanted.json.write_text(json.dumps(records, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    sys.stdout.flush()
    return report.exit_code


def describe(report: StaticReport) -> str:
    """Every finding, and how many there are."""
    lines = [*map(str, report.findings), f"{report.files:,} files checked, {len(report.findings):,} findings"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
