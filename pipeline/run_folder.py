"""The folder of one run: its settings, its log, and a record of command, versions, and stages with time and peak."""

import logging
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TextIO, cast

from omegaconf import OmegaConf

from instruments.errors import ConfigError, LastingStream, printable, redact
from instruments.files import write_json
from pipeline.help import PACKAGE
from pipeline.settings import Settings

RECORD = "stages.json"
PACKAGES = ("torch", "transformers", "safetensors", "numpy", "scikit-learn", "umap-learn", "hydra-core")


def installed_versions() -> dict[str, str]:
    """Versions of Python and the packages that affect results."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


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

    overrides: list[str]
    results: list[str] = field(default_factory=list)  # of all planned stages: their folders below artifacts/
    versions: dict[str, str] = field(default_factory=installed_versions)
    stages: list[StageRun] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write `stages.json` atomically."""
        write_json(folder / RECORD, asdict(self))


class RunFolder:
    """`outputs/runs/<time>/`: config.yaml, run.log, stages.json, report.html, a link to the checkpoint.

    Raises ConfigError: the folder is one of the output folder's own.
    """

    def __init__(
        self, folder: Path, settings: Settings, overrides: Sequence[str], results: Sequence[Path] = ()
    ) -> None:
        """Create the folder; write the settings and the record, with the folders of all results that are planned."""
        self.folder = folder
        self.output_dir = Path(settings.output_dir).absolute()
        own = [self.output_dir / name for name in ("artifacts", "latest")]
        if folder.absolute() == self.output_dir or any(folder.absolute().is_relative_to(place) for place in own):
            what = f"a run in {folder} would not be found by `python -m pipeline runs`"
            raise ConfigError(what, where="setting hydra.run.dir", do="another folder, or the command without it")
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / RECORD).is_file():  # of an earlier run
            for name in ("checkpoint", "report.html"):
                (folder / name).unlink(missing_ok=True)
        planned = [str(result.relative_to(self.output_dir / "artifacts")) for result in results]
        self.record = RunRecord([redact(word) for word in overrides], planned)
        self.record.write(folder)
        if not folder.absolute().is_relative_to(self.output_dir):  # `python -m pipeline runs` has to find it
            runs = self.output_dir / "runs"
            runs.mkdir(parents=True, exist_ok=True)
            replace_link(runs / str(folder.absolute()).strip("/").replace("/", "_"), folder)
        config = OmegaConf.to_yaml(OmegaConf.structured(settings))
        (folder / "config.yaml").write_text(redact(config), encoding="utf-8")

    def record_stage(
        self, name: str, fingerprint: str, seconds: float | None = None, peak_bytes: int | None = None
    ) -> None:
        """Add one stage to `stages.json`; a kept stage has no figures."""
        self.record.stages.append(StageRun(name, fingerprint, seconds, peak_bytes))
        self.record.write(self.folder)

    def link_latest(self, checkpoint: Path | None) -> Path:
        """Link `latest` to this folder, and this folder's `checkpoint` to the run's, if any; returns `latest`."""
        if checkpoint is not None:
            replace_link(self.folder / "checkpoint", checkpoint)
        latest = self.output_dir / "latest"
        replace_link(latest, self.folder)
        return latest


def replace_link(link: Path, target: Path) -> None:
    """Make `link` a relative symbolic link to `target`; an older link is replaced atomically."""
    new = link.with_name(f".{link.name}.{os.getpid()}")
    new.unlink(missing_ok=True)  # left by a killed process of the same number, as in a restarted container
    # Resolved: the system follows `..` from the folder itself, not from the link through which it was reached.
    new.symlink_to(os.path.relpath(target.resolve(), link.parent.resolve()), target_is_directory=True)
    new.replace(link)


OWN_LOGGERS = (*(PACKAGE + name for name in ("pipeline", "stages", "models")), "py.warnings")


class RedactingFormatter(logging.Formatter):
    """Formats log lines and tracebacks without the passwords of addresses."""

    def format(self, record: logging.LogRecord) -> str:
        """The log line; control characters are escaped, since names from files must not control the terminal."""
        return printable(redact(super().format(record)))


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


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Send the project's log and Python's warnings to the console and, with times, to a file."""
    console = logging.StreamHandler(sys.stdout and cast(TextIO, LastingStream(sys.stdout)))
    console.setFormatter(RedactingFormatter())
    record = LogFile(path, encoding="utf-8", errors="backslashreplace")
    record.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.captureWarnings(capture=True)
    loggers = [logging.getLogger(name) for name in OWN_LOGGERS]
    before = [(logger, logger.level, logger.handlers, logger.propagate) for logger in loggers]
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
        for logger, level, handlers, propagate in before:
            logger.setLevel(level)
            logger.handlers, logger.propagate = handlers, propagate
        logging.captureWarnings(capture=False)
        with suppress(OSError):  # a full disk, which was reported with the first line
            record.close()
