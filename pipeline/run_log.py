"""The log of a run: on the console, and with times in a file; passwords and control characters are removed."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from instruments.errors import printable, redact

# In an installed package, all our names begin with its own.
_PACKAGE = __name__.removesuffix("pipeline.run_log")
OWN_LOGGERS = (*(_PACKAGE + name for name in ("pipeline", "stages", "models")), "py.warnings")


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


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Send the project's log and Python's warnings to the console and, with times, to a file."""
    console = Console(sys.stdout)
    console.setFormatter(RedactingFormatter())
    record = LogFile(path, encoding="utf-8", errors="backslashreplace")
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
