"""The command in a child of this process, which has imported everything already."""

import multiprocessing
import os
from pathlib import Path

from pipeline.cli import run_command


def start(command, said: Path | None = None):
    """Run the command in a child; what it says goes to the file `said`, or nowhere."""

    def run():
        sink = os.open(said or os.devnull, os.O_WRONLY | os.O_CREAT)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        os._exit(run_command(command))

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    return child
