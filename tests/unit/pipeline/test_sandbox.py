"""The jail for code that a model wrote: right and wrong answers, and attacks."""

import sys
import time
from pathlib import Path

import pytest

from instruments.errors import ConfigError
from pipeline import sandbox
from pipeline.sandbox import ENDED, LATE, SOLVED, judge, require_jail

TESTS = "assert double(3) == 6\nassert double(0) == 0"
RIGHT = "def double(x):\n    return 2 * x\n"


@pytest.fixture(scope="module", autouse=True)
def jail():
    try:
        require_jail()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        (RIGHT, SOLVED),
        (f"{RIGHT}print('it prints')", SOLVED),
        ("import math, dataclasses, typing, heapq\ndouble = lambda x: math.prod([2, x])", SOLVED),
        ("def double(x):\n    return x * x", "raised AssertionError"),
        ("def triple(x):\n    return 3 * x", "raised NameError"),
        ("def double(x)\n    return 2 * x", "raised SyntaxError"),
        (f"{RIGHT}\0", "raised SyntaxError"),
        (f"{RIGHT}input()", "raised EOFError"),
        (f"def double(x):\n    return double(x)\n{RIGHT}double = double(double)", "raised TypeError"),
    ],
)
def test_an_answer_is_solved_if_all_asserts_hold(code, verdict):
    assert judge(code, TESTS) == verdict


def test_an_answer_may_import_numpy():
    assert judge(f"import numpy\n{RIGHT}", TESTS) in {SOLVED, "raised ModuleNotFoundError"}


ENDING = {
    "exit": ("raise SystemExit(0)", "raised SystemExit"),
    "exit in the function": ("def double(x):\n    raise SystemExit", "raised SystemExit"),
    "exit of the process": ("import os; os._exit(0)", ENDED),
    "exit at exit": ("import atexit, os; atexit.register(os._exit, 0); double = print", "raised AssertionError"),
    "own process": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", LATE),
    "all processes": ("import os, signal; os.kill(-1, signal.SIGKILL)", "raised ProcessLookupError"),
    "first process": (
        "import os, time\ntry:\n    os.kill(1, 15); time.sleep(9)\nexcept PermissionError:\n    os._exit(0)  # of root",
        ENDED,
    ),
    "a crash": ("import ctypes; ctypes.string_at(0)", ENDED),
    "other asserts": (
        "import builtins, os\nbuiltins.exec = builtins.compile = lambda *_: None\nbuiltins.AssertionError = KeyError\n"
        "os.write = os._exit = print\ndouble = abs",
        "raised AssertionError",
    ),
    "a guessed token": ("import os; os.write(3, b'0' * 32); os._exit(0)", ENDED),
    "an error of the name of the verdict": ("raise type('solved', (Exception,), {})", "raised solved"),
    "a jump": (
        "import sys\ndef jump(frame, *_):\n    frame.f_lineno = 3\n    return jump\nsys.settrace(lambda *_: jump)",
        "raised NameError",
    ),
    "an error of any name": ("raise type(chr(27) + '[2J', (Exception,), {})", ENDED),
}


@pytest.mark.parametrize("attack", ENDING)
def test_an_answer_that_ends_before_its_asserts_is_not_solved(attack):
    code, verdict = ENDING[attack]
    assert judge(code, TESTS) == verdict


LIMITED = {
    "memory": ("x = bytearray(2**30)", "raised MemoryError"),
    "forks": ("import os\nwhile True: os.fork()", "raised BlockingIOError"),
    "output": ("while True: print('x' * 10000)", "raised OSError"),
    "one file": ("open('/tmp/x', 'wb').write(b'1' * 2**22)", "raised OSError"),
    "all files": ("for i in range(99): open(f'/tmp/{i}', 'wb').write(b'1' * 2**19)", "raised OSError"),
    "number of files": ("for i in range(9999): open(f'/tmp/{i}', 'w').close()", "raised OSError"),
    "shared memory": ("import ctypes; assert ctypes.CDLL(None).shmget(0, 2**28, 0o1600) >= 0", "raised AssertionError"),
    "semaphores": ("import ctypes; assert ctypes.CDLL(None).semget(0, 999, 0o1600) >= 0", "raised AssertionError"),
    "messages": ("import ctypes; assert ctypes.CDLL(None).msgget(0, 0o1600) >= 0", "raised AssertionError"),
    "its guard": ("import ctypes; assert ctypes.CDLL(None).ptrace(0x4206, 1, 0, 0) == 0", "raised AssertionError"),
    "higher limits": ("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "raised ValueError"),
    "network": ("import socket; socket.create_connection(('1.1.1.1', 53))", "raised OSError"),
    "new namespaces": ("import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0", "raised AssertionError"),
    "another root": ("import os; os.chroot('/tmp')", "raised PermissionError"),
    "files of the system": (f"open({str(Path(sys.base_prefix) / 'evil')!r}, 'w')", "raised OSError"),
    "processes": ("open('/proc/1/environ')", "raised FileNotFoundError"),
    "open files": ("import os; [os.fstat(fd) for fd in range(4)]\nos.fstat(4)", "raised OSError"),
    "environment": ("import os; assert set(os.environ) <= {'LC_CTYPE', 'OPENBLAS_NUM_THREADS'}\n" + RIGHT, SOLVED),
}


@pytest.mark.parametrize("attack", LIMITED)
def test_an_answer_reaches_its_limits(attack):
    code, verdict = LIMITED[attack]
    assert judge(code, TESTS) == verdict


@pytest.mark.parametrize(
    "code", ["while True: pass", "import time; time.sleep(99)", "import os; os.kill(os.getpid(), 19)"]
)
def test_an_answer_that_never_ends_is_killed(code, monkeypatch):
    monkeypatch.setattr(sandbox, "SECONDS", 0.5)  # four times what it takes to start
    begin = time.monotonic()
    assert judge(code, TESTS) == LATE
    assert time.monotonic() - begin < 5


def test_the_prefix_of_python_may_be_a_link(tmp_path, monkeypatch):
    (tmp_path / "python").symlink_to(sys.base_prefix)
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "python"))
    require_jail()


def test_files_of_this_machine_are_neither_read_nor_written(tmp_path, monkeypatch):
    secret, written = tmp_path / "secret", tmp_path / "written"
    secret.write_text("s")
    monkeypatch.setenv("SECRET_FILE", str(secret))
    for code in (
        f"open({str(secret)!r})",
        f"open({str(written)!r}, 'w')",
        "import os; open(os.environ['SECRET_FILE'])",
    ):
        assert judge(code, TESTS) in {"raised FileNotFoundError", "raised KeyError"}
    assert not written.exists()


def test_a_machine_without_a_jail_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox, "_NAMESPACES", ["unshare", "--no-such-namespace"])
    with pytest.raises(ConfigError) as caught:
        require_jail()
    assert caught.value.where == "--run-code"
    assert "no-such-namespace" in caught.value.what
