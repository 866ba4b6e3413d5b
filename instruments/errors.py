"""Errors for the person at the keyboard: what happened, where, what to do; and what command lines make of them."""

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

# The user information of an address: a password goes, and of a web address also a user alone, which is a token.
_USER_INFORMATION = re.compile(r"(?<![\w+.-])([a-z][\w+.-]*)://([^\s'\":/@]*)(:[^\s'\"]*)?@", re.IGNORECASE)
_OPTION = re.compile(r"([?&](?:password|token)=)[^&\s'\"]*", re.IGNORECASE)


def redact(text: str) -> str:
    """The text without the passwords of its addresses; user names stay, so that it can still be pasted."""

    def without(found: re.Match[str]) -> str:
        scheme, user, _password = found.groups()
        return f"{scheme}://{user}@" if user and not scheme.lower().startswith("http") else f"{scheme}://"

    return _OPTION.sub(r"\1", _USER_INFORMATION.sub(without, text))


class UserError(Exception):
    """Something the user can correct. Printed without a traceback.

    Args:
        what: what happened, with the value and the bound.
        where: stage, file, layer or option; every offender.
        do: a remedy that can be pasted.
    """

    def __init__(self, what: str, *, where: str = "", do: str = "") -> None:
        """Keep the three parts apart, so that reports can lay them out."""
        # Line breaks are spelled out: a name from a file must not look like a remedy.
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
    """The text cannot be read or holds nothing to learn from."""


class ContractError(UserError):
    """What passes between stages is missing, damaged or of another version."""


class NumericsError(UserError):
    """A computation gave no usable number."""


FAILED, INVALID, INTERRUPTED = 1, 2, 130


def exit_code(work: Callable[[], int | None]) -> int:
    """What `work` returns, or 0; an error of the user's is said on stderr, and tells settings (2) from the rest (1)."""
    try:
        code = work() or 0
        sys.stdout.flush()
        return code
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


def some(names: Iterable[str], most: int = 5, separator: str = "; ") -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    more = f"{separator.rstrip(' ,')} and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


def check_output(*outs: Path | None) -> None:
    """Before anything is computed. Raises ConfigError: the folder of one is not there, or it is one itself."""
    for out in filter(None, outs):
        if not out.parent.is_dir():
            raise ConfigError(f"there is no folder {out.parent}", where=str(out), do=f"mkdir -p {out.parent}")
        if out.is_dir():
            raise ConfigError(f"{out} is a folder", where="command line", do="name another output file")
