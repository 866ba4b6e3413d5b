"""`python -m pipeline`."""

import logging
import os
import sys
from io import TextIOWrapper
from typing import NoReturn

from pipeline.help import help_page
from stages.artifacts.job import find_workers


def main() -> int:
    """Show the help page, or run the command; returns the exit code."""
    words = sys.argv[1:]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # what the terminal's encoding lacks is spelled out
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _do(words)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _do(words: list[str]) -> int:
    if {"-h", "--help", "help"} & set(words):
        sys.stdout.write(help_page())
        return 0
    if not find_workers().leads:
        os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported: the leading worker alone shows bars
    from pipeline.cli import run_command  # noqa: PLC0415 - the help page needs none of what this imports

    return run_command(words)


def leave(code: int) -> NoReturn:
    """End the process; one of several workers ends it at once.

    Its process group outlives its own destruction, since DistributedDataParallel keeps hold of it: a thread of gloo
    that lets go of a tensor while Python shuts down aborts the process, and torchrun then calls a whole job failed.
    """
    if find_workers().world > 1:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    leave(main())
