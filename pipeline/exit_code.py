"""What the commands beside the pipeline end with."""

import sys
from collections.abc import Callable

from models.errors import ConfigError, UserError

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
