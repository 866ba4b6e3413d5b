"""The monitor on parameters that are spread over processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_shards_are_added_up():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    command = [sys.executable, "-m", "numerics.sharded_watch"]
    running = [
        subprocess.Popen([*command, str(rank), port], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [child.communicate(timeout=120)[1] for child in running]
    assert [child.returncode for child in running] == [0, 0], errors
