"""What the commands share: exit codes and the file to write."""

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
        sys.stderr.write(f"{error}\n")
        return INVALID if isinstance(error, ConfigError) else FAILED
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
        return 0


def check_output(out: Path) -> None:
    """Before anything is computed. Raises ConfigError: its folder is not there, or it is one itself."""
    if not out.parent.is_dir():
        raise ConfigError(f"there is no folder {out.parent}", where=str(out), do=f"mkdir -p {out.parent}")
    if out.is_dir():
        raise ConfigError(f"{out} is a folder", where="command line", do="name another output file")
