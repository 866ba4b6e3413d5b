"""The command, or workers of one job, in forked children, which need no imports."""

import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from functools import reduce
from importlib import import_module
from itertools import count
from multiprocessing import Process
from pathlib import Path
from unittest.mock import patch

import torch

from pipeline.cli import run_command
from stages.artifacts.job import Workers

LIMIT = 300  # seconds for the children of one test


def start(command, said: Path | None = None, *, work=run_command, **environment):
    """Run the command, or `work(command)`, in a child; its output goes to the file `said`, or nowhere."""

    def run():
        sink = os.open(said or os.devnull, os.O_WRONLY | os.O_CREAT)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        # Those of pytest write to files of their own.
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
        os.environ.update(environment)
        torch.set_num_threads(1)
        code = 1
        try:
            code = work(command)
        finally:
            os._exit(code)

    return fork(run)


def fork(run, *args):
    """Start `run` in a child, which ends with this process at the latest."""
    child = multiprocessing.get_context("fork").Process(target=run, args=args, daemon=True)
    child.start()
    return child


def run_workers(count, command, folder):
    """Run the command in `count` workers as torchrun does: if one fails, the others get SIGTERM.

    Returns each worker's exit code and output.
    """
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(count)}
    folder.mkdir(exist_ok=True)
    children = [
        start(command, folder / f"said{rank}", **place, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(count)
    ]
    latest = time.monotonic() + LIMIT
    while any(child.is_alive() for child in children) and not any(child.exitcode for child in children):
        assert time.monotonic() < latest, [path.read_text() for path in folder.glob("said*")]
        time.sleep(0.05)
    for end in (lambda _: None, Process.terminate, Process.kill):
        for child in children:
            end(child)
            child.join(2)
    return [(child.exitcode, (folder / f"said{rank}").read_text()) for rank, child in enumerate(children)]


def kill_at(command, place, calls, *, work=run_command):
    """Run `work(command)` in a child that gets SIGKILL at the `calls`-th call of `module:function`, the `place`."""
    module, _, names = place.partition(":")
    *outer, name = names.split(".")
    owner = reduce(getattr, outer, import_module(module))
    original, left = getattr(owner, name), count(calls - 1, -1)

    def counted(*args, **kwargs):
        if not next(left):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    with patch.object(owner, name, counted):
        child = start(command, work=work)
    child.join(LIMIT)
    assert child.exitcode == -signal.SIGKILL, f"{place} was not called {calls} times"


def run_ranks(world, work):
    """Run `work(rank)` in `world` processes of one thread each; all must succeed."""

    def run(rank):
        torch.set_num_threads(1)
        code = 1
        try:
            work(rank)
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)

    children, latest = [fork(run, rank) for rank in range(world)], time.monotonic() + LIMIT
    for child in children:
        child.join(max(0, latest - time.monotonic()))
    assert [child.exitcode for child in children] == [0] * world


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def as_workers(world, work):
    """Run `work(workers)` in `world` processes connected by gloo; all must succeed."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(world)}

    def run(rank):
        os.environ.update(place, RANK=str(rank))
        workers = Workers(rank, world, rank, world)
        with workers.connected():
            work(workers)

    run_ranks(world, run)
