"""`python -m simulated_device CASES.json FOUND.json`: commands of the pipeline on the simulated device.

In a process of its own, since a device cannot be taken from torch again. Both files map the name of a case: to the
words of its command, and to its exit code, what it said, and where its host waited for the device, how many times.
"""

import io
import json
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from pipeline.cli import run_command
from simulated_device import NAME, counted_waits, load_device


def run_case(words: list[str]) -> dict[str, object]:
    """One command."""
    said = io.StringIO()
    with counted_waits() as waits, redirect_stdout(said), redirect_stderr(said):
        try:
            code = run_command(words)
        except Exception:  # noqa: BLE001 - the test reports it
            code = traceback.format_exc()
    return {"code": code, "said": said.getvalue(), "waits": {" ".join(key): count for key, count in waits.items()}}


def main(cases: Path, found: Path) -> None:
    """Run all cases in their order."""
    load_device()
    with patch.dict("models.config._DEVICE", pattern=(rf"auto|cpu|{NAME}(:\d+)?", "a device")):
        results = {name: run_case(words) for name, words in json.loads(cases.read_text()).items()}
    found.write_text(json.dumps(results))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
