"""`python -m pipeline report RUN_FOLDER|latest`: writes report.html of an earlier run."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from instruments.errors import ConfigError, UserError, check_output, exit_code
from pipeline.disk import explain_os_error
from pipeline.help import find_workspace

OUTPUTS = find_workspace() / "outputs"


def main(words: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 reading or writing failed, 2 the command line is wrong, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m pipeline report", description="Write the report of a run.")
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER|latest", help="a folder under outputs/runs, or latest")
    parser.add_argument(
        "--output-dir", type=Path, default=OUTPUTS, metavar="FOLDER", help=f"where latest is (default: {OUTPUTS})"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="output file (default: report.html in the folder)")
    wanted = parser.parse_args(words)
    return exit_code(lambda: _write(wanted.run, wanted.out, wanted.output_dir))


def _write(run: Path, out: Path | None, output_dir: Path) -> None:
    """Write the page. Raises UserError: the run cannot be read, or the file cannot be written."""
    folder = (output_dir / run).resolve() if str(run) == "latest" and not run.is_dir() else run
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}", where="command line", do="ls outputs/runs, or latest")
    check_output(out)
    out = out or folder / "report.html"
    from pipeline.report.page import find_source, write_page  # noqa: PLC0415 - loads matplotlib

    try:
        write_page(find_source(folder), out)
    except OSError as error:
        raise explain_os_error(error, where=str(out), folder=out.parent, do="--out FILE elsewhere") or UserError(
            str(error)
        ) from error
    sys.stdout.write(f"{out}\n")


if __name__ == "__main__":
    sys.exit(main())
