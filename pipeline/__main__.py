"""`python -m pipeline`."""

import logging
import os
import sys
from io import TextIOWrapper
from runpy import run_module
from typing import NoReturn

from instruments.errors import INTERRUPTED
from pipeline.help import help_page
from stages.artifacts.job import find_workers

# Modules of this package with a command of their own: `python -m pipeline.dump`, or `tiny-onn dump`.
TOOLS = {"auto_diff", "dump", "gguf", "harness", "mscan", "report", "serve_check", "static_check", "store", "watch_log"}


def main() -> int:
    """Show the help page or run the command; returns the exit code."""
    words = sys.argv[1:]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal may be unable to encode every character
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _do(words)
        sys.stdout.flush()
    except KeyboardInterrupt:  # while modules are imported
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `| head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _do(words: list[str]) -> int:
    if words and words[0] in TOOLS:
        sys.argv[:] = words
        run_module(f"{__package__}.{words[0]}", run_name="__main__")
        return 0
    if {"-h", "--help", "help"} & set(words):
        sys.stdout.write(help_page())
        return 0
    if not find_workers().leads:
        os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported; only the leading worker shows progress bars
    from pipeline.cli import run_command  # noqa: PLC0415 - slow, and the help page does not need it

    return run_command(words)


def leave(code: int) -> NoReturn:
    """End the process; a worker of torchrun skips Python's shutdown.

    DistributedDataParallel keeps the process group alive after it is destroyed. A gloo thread that frees a tensor
    during Python's shutdown then aborts the process, and torchrun reports the whole job as failed.
    """
    if find_workers().world > 1:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    leave(main())
