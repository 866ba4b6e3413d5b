"""Errors that the user can correct (what happened, where, what to do), and the exit codes of command lines."""

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from errno import EACCES, ELOOP, ENAMETOOLONG, EPERM
from pathlib import Path
from typing import Any, TextIO, TypeVar

Item = TypeVar("Item")
# User information of an address. Passwords are removed; in web addresses user names too, since they may be tokens.
_USER_INFORMATION = re.compile(r"(?<![\w+.-])([a-z][\w+.-]*)://([^\s'\":/@]*)(:[^\s'\"]*)?@", re.IGNORECASE)
_OPTION = re.compile(r"([?&](?:password|token)=)[^&\s'\"]*", re.IGNORECASE)


def redact(text: str) -> str:
    """Remove passwords and tokens from addresses in the text; other user names stay, so that it can be pasted."""

    def without(found: re.Match[str]) -> str:
        scheme, user, _password = found.groups()
        return f"{scheme}://{user}@" if user and not scheme.lower().startswith("http") else f"{scheme}://"

    return _OPTION.sub(r"\1", _USER_INFORMATION.sub(without, text))


class UserError(Exception):
    """An error that the user can correct; printed without a traceback.

    Args:
        what: what happened, with the value and the bound.
        where: stage, file, layer or option; all offenders.
        do: a remedy that can be pasted.
    """

    def __init__(self, what: str, *, where: str = "", do: str = "") -> None:
        """Store the three parts separately, so that reports can lay them out."""
        # Line breaks are escaped: a name from a file must not look like a remedy.
        self.what, self.where, self.do = (redact(text).replace("\n", "\\n") for text in (what, where, do))
        lines = [self.what]
        if where:
            lines.append(f"  where: {self.where}")
        if do:
            lines.append(f"  do:    {self.do}")
        super().__init__("\n".join(lines))


class ConfigError(UserError):
    """A setting is wrong; found before any weights are loaded."""


class CheckpointError(UserError):
    """A checkpoint cannot be read or written."""


class DataError(UserError):
    """The text cannot be read or used."""


class ContractError(UserError):
    """Data from another stage or a file is missing, damaged, inconsistent or of another version."""


class NumericsError(UserError):
    """A computation gave unusable values."""


FAILED, INVALID, INTERRUPTED = 1, 2, 130
PATH_FAULTS = {EACCES, EPERM, ENAMETOOLONG, ELOOP}


def exit_code(work: Callable[[], int | None], name: str = "") -> int:
    """Run `work` and return its exit code (None: 0). A UserError is printed on stderr: 2 for ConfigError, else 1.

    `name` precedes the error. An OSError about a path that the user may not open, or nobody can, becomes a UserError.
    """
    try:
        code = work() or 0
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader closed the pipe, as `| head` does
        sys.stderr.close()
        return 0
    except (UserError, OSError) as error:
        found = error
        if isinstance(error, OSError):
            if error.errno not in PATH_FAULTS:
                raise
            what, do = f"cannot open {error.filename}: {error.strerror}", "check the path and its permissions"
            found = UserError(what, do=do)
        sys.stderr.write(f"{printable(f'{name}{found}')}\n")
        return INVALID if isinstance(found, ConfigError) else FAILED


class LastingStream:
    """A stream that goes on into /dev/null once its reader has ended, as with `| head`; the run goes on, too."""

    def __init__(self, stream: TextIO) -> None:
        """`stream` has a file descriptor."""
        self._stream = stream

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As the stream does."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._close()
            return len(text)

    def flush(self) -> None:
        """As the stream does."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._close()

    def _close(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def printable(text: str) -> str:
    """Escape control characters: names from files must not control the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)


def say(text: str) -> None:
    """Write text to stdout; characters that its encoding lacks are escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(printable(text).encode(encoding, "backslashreplace").decode(encoding))


def first_line(error: BaseException) -> str:
    """The first line of an error's text, at most 200 characters, or its class name if there is none."""
    first, _, rest = str(error).strip().partition("\n")
    # After a colon, the reason is on the next line.
    text = f"{first} {rest.strip().partition(chr(10))[0]}" if first.endswith(":") else first
    return text.strip()[:200] or type(error).__name__


def some(names: Iterable[str], most: int = 5, separator: str = "; ") -> str:
    """The first names, and the number of the others."""
    names = list(names)
    more = f"{separator.rstrip(' ,')} and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


def align(rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table with aligned columns."""
    rows = [*rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def progress(items: Sequence[Item], name: str) -> Iterable[Item]:
    """The items, with a progress bar on a terminal if tqdm is installed."""
    try:
        from tqdm import tqdm  # noqa: PLC0415 - not needed otherwise
    except ImportError:
        return items
    bar: Iterable[Item] = tqdm(items, desc=name, leave=False, disable=None)
    return bar


def check_output(*outs: Path | None) -> None:
    """Check output paths before anything is computed. Raises ConfigError: no parent folder, or the path is a folder."""
    for out in filter(None, outs):
        if not out.parent.is_dir():
            raise ConfigError(
                f"there is no folder {out.parent}", where=str(out), do=shlex.join(["mkdir", "-p", str(out.parent)])
            )
        if out.is_dir():
            raise ConfigError(f"{out} is a folder", where="command line", do="name another output file")
