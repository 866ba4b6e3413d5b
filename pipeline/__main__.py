"""`python -m pipeline`."""

import logging
import os
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from io import TextIOWrapper
from signal import SIG_DFL, SIGINT, default_int_handler, getsignal, signal
from typing import NoReturn

from instruments.errors import INTERRUPTED, LastingStream
from pipeline.help import PACKAGE, PROGRAMS, help_page
from stages.artifacts.job import find_workers


def main() -> int:
    """Show the help page or run the command; returns the exit code."""
    words = sys.argv[1:]
    for name in ("stdout", "stderr"):
        if isinstance(stream := getattr(sys, name), TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may be unable to encode every character
            setattr(sys, name, LastingStream(stream))
    try:
        return _do(words)
    except KeyboardInterrupt:  # while modules are imported
        return INTERRUPTED
    finally:
        if sys.stdout:  # which a shell can close
            sys.stdout.flush()


def _do(words: list[str]) -> int:
    if words and words[0] in PROGRAMS:
        code: int = import_module(PACKAGE + PROGRAMS[words[0]][0]).main(words[1:])
        return code
    if {"-h", "--help", "help"} & set(words):
        sys.stdout.write(help_page(words))
        return 0
    if "--version" in words:
        try:
            number = version("tiny-onn")
        except PackageNotFoundError:  # a clone that is not installed
            number = "(not installed; the version is in pyproject.toml)"
        sys.stdout.write(f"tiny-onn {number}\n")
        return 0
    workers = find_workers()
    if not workers.leads:
        os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported; only the leading worker shows progress bars
    if workers.world > 1 and os.environ.get("OMP_NUM_THREADS") == "1":
        # The default of torchrun, which leaves most of a machine's cores idle; read when torch is imported.
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // workers.local_world))
    # Until the imports are done, an interrupt ends the process at once: packages answer it with errors of their own.
    before = signal(SIGINT, SIG_DFL) if getsignal(SIGINT) is default_int_handler else None
    from pipeline.cli import run_command  # noqa: PLC0415 - slow, and the help page does not need it

    if before is not None:
        signal(SIGINT, before)
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
