"""What the commands share: exit codes, the file to write, and text that a terminal can show."""

import sys
from collections.abc import Callable
from pathlib import Path

from instruments.errors import ConfigError, UserError

FAILED, INVALID, INTERRUPTED = 1, 2, 130


def exit_code(work: Callable[[], int | None]) -> int:
    """What `work` returns, or 0; an error of the user's is said on stderr, and tells settings (2) from the rest (1)."""
    try:
        return work() or 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except UserError as error:
        sys.stderr.write(f"{printable(str(error))}\n")
        return INVALID if isinstance(error, ConfigError) else FAILED
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
        return 0


def printable(text: str) -> str:
    """The text with control characters spelled out: names from files must not steer the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)


def say(text: str) -> None:
    """Write to stdout what its encoding can show of the text."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(printable(text).encode(encoding, "backslashreplace").decode(encoding))


def check_output(out: Path) -> None:
    """Before anything is computed. Raises ConfigError: its folder is not there, or it is one itself."""
    if not out.parent.is_dir():
        raise ConfigError(f"there is no folder {out.parent}", where=str(out), do=f"mkdir -p {out.parent}")
    if out.is_dir():
        raise ConfigError(f"{out} is a folder", where="command line", do="name another output file")
