"""Response time of the command line."""

import subprocess
import sys
import time
from pathlib import Path

from benchmarks.rows import Row

REPOSITORY = Path(__file__).parents[2]


def measure_start_up(repetitions: int) -> list[Row]:
    """Seconds until the help page is printed."""
    command = [sys.executable, "-m", "pipeline", "--help"]
    seconds = []
    for _ in range(repetitions + 1):
        start = time.perf_counter()
        subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, check=True)
        seconds.append(time.perf_counter() - start)
    return [Row("start-up of python -m pipeline --help", seconds[1:], at_most=3.0, unit="s")]
