"""The record of one run: settings, log, report, and its stages with times and peak memory."""

import json
import logging
import os
import platform
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TextIO

from omegaconf import OmegaConf
from tabulate import tabulate

from instruments.errors import ContractError, UserError, printable, redact
from instruments.files import write_json
from pipeline.artifacts import LARGEST, UNREADABLE
from pipeline.overrides import command_line
from pipeline.settings import Settings
from stages.artifacts.job import Table

RECORD = "stages.json"
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
        write_json(folder / RECORD, asdict(self))


def read_run_record(folder: Path) -> RunRecord:
    """Read `stages.json`. Raises ContractError: missing or damaged."""
    try:
        values = json.loads((folder / RECORD).read_text(encoding="utf-8"))
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


log = logging.getLogger(__name__)

# The packages' loggers; inside an installed package their names begin with its name.
OWN_LOGGERS = (
    *(__package__.removesuffix("pipeline") + name for name in ("pipeline", "stages", "models")),
    "py.warnings",
)


class RedactingFormatter(logging.Formatter):
    """Formats log lines and tracebacks without the passwords of addresses."""

    def format(self, record: logging.LogRecord) -> str:
        """The log line; control characters are escaped, since names from files must not control the terminal."""
        return printable(redact(super().format(record)))


class Console(logging.StreamHandler[TextIO]):
    """Log lines on stdout; once the reader has ended, as with `| head`, the run continues without them."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Redirect output to /dev/null if the pipe is closed; other errors as usual."""
        if isinstance(sys.exc_info()[1], BrokenPipeError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        else:
            super().handleError(record)


class LogFile(logging.FileHandler):
    """Log lines with times; if the disk is full, report missing lines once and let the run continue."""

    failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Report the first OSError on stderr; other errors as usual."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.failed:
            self.failed = True
            sys.stderr.write(f"{self.baseFilename} lacks lines from here on: {error}\n")

    def close(self) -> None:
        """Close the file; report lines that cannot be written, unless that was done before."""
        try:
            super().close()
        except OSError as error:
            if not self.failed:
                sys.stderr.write(f"{self.baseFilename} lacks its last lines: {error}\n")


class RunFolder:
    """`outputs/runs/<time>/`: config.yaml, run.log, report.md, stages.json, report.html, a link to the checkpoint."""

    def __init__(self, folder: Path, settings: Settings, overrides: Sequence[str]) -> None:
        """Create the folder; write the settings and the heading of the report."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.label, self.output_dir = settings.model.label, Path(settings.output_dir).absolute()
        self.latest = self.output_dir / "latest"
        self.record = RunRecord.start([redact(word) for word in overrides])
        self.record.write(folder)
        config = OmegaConf.to_yaml(OmegaConf.structured(settings))
        (folder / "config.yaml").write_text(redact(config), encoding="utf-8")
        self.report = folder / "report.md"
        self.append(f"# {settings.model.label}\n\n    {command_line(overrides)}\n")

    def append(self, text: str) -> None:
        """Add text to the report, which always holds all finished stages."""
        with self.report.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(redact(text))

    def append_stage(self, name: str, headline: str, table: Table) -> None:
        """Add one stage to the report."""
        self.append(f"\n## {name}\n\n{headline}\n\n{render(table, 'github')}\n")

    def record_stage(
        self, name: str, fingerprint: str, seconds: float | None = None, peak_bytes: int | None = None
    ) -> None:
        """Add one stage to `stages.json`; a kept stage has no figures."""
        self.record.stages.append(StageRun(name, fingerprint, seconds, peak_bytes))
        self.record.write(self.folder)

    def write_page(self, last: Path) -> Path | None:
        """Write report.html about the published result `last`; a failure only warns."""
        from pipeline.report.page import FILE, Source, write_page  # noqa: PLC0415 - loads numpy

        try:
            config = (self.folder / "config.yaml").read_text(encoding="utf-8")
            return write_page(Source(self.label, self.record, config, last, self.output_dir), self.folder / FILE)
        except (UserError, OSError) as error:
            log.warning("no report.html: %s", error)
            return None

    def link_latest(self, checkpoint: Path | None) -> Path:
        """Link `latest` to this folder, and this folder's `checkpoint` to the run's, if any; returns `latest`."""
        if checkpoint is not None:
            replace_link(self.folder / "checkpoint", checkpoint)
            self.append(f"\nCheckpoint: {checkpoint}\n")
        replace_link(self.latest, self.folder)
        return self.latest

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Send the project's log and Python's warnings to the console and, with times, to run.log."""
        console = Console(sys.stdout)
        console.setFormatter(RedactingFormatter())
        record = LogFile(self.folder / "run.log", encoding="utf-8", errors="backslashreplace")
        record.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.captureWarnings(capture=True)
        loggers = [logging.getLogger(name) for name in OWN_LOGGERS]
        for logger in loggers:
            logger.setLevel(logging.INFO)
            logger.handlers = [console, record]
            logger.propagate = False
        try:
            yield
        except Exception:
            record.handle(logging.LogRecord("pipeline", logging.ERROR, "", 0, "failed", None, sys.exc_info()))
            raise
        finally:
            for logger in loggers:
                logger.handlers = []
                logger.propagate = True
            logging.captureWarnings(capture=False)
            record.close()


def replace_link(link: Path, target: Path) -> None:
    """Make `link` a relative symbolic link to `target`; an older link is replaced atomically."""
    new = link.with_name(f".{link.name}.{os.getpid()}")
    new.unlink(missing_ok=True)  # left by a killed process of the same number, as in a restarted container
    # Resolved: the system follows `..` from the folder itself, not from the link through which it was reached.
    new.symlink_to(os.path.relpath(target.resolve(), link.parent.resolve()), target_is_directory=True)
    new.replace(link)


def render(table: Table, style: str) -> str:
    """A table as text with its notes below; text cells are not formatted again."""
    rows = [[_render_cell(cell) for cell in row] for row in table.rows]
    aligned = ["left", *["right"] * (len(table.columns) - 1)] if rows else None
    body = tabulate(rows, headers=list(table.columns), tablefmt=style, colalign=aligned, disable_numparse=True)
    notes = "".join(f"\n{note}" for note in table.notes)
    return f"{table.title}\n\n{body}" + (f"\n{notes}" if notes else "")


def _render_cell(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:.4g}"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)


STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def start_measuring() -> None:
    """Free the memory of earlier stages and reset the peak."""
    from models.loading import release_freed_memory  # noqa: PLC0415 - loads torch

    release_freed_memory()
    with suppress(OSError):  # macOS has no such file: there the peak is that of the whole process
        CLEAR_REFS.write_text("5")


def peak_bytes() -> int:
    """Highest resident memory since `start_measuring`, in bytes."""
    if STATUS.exists():
        line = next(line for line in STATUS.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
