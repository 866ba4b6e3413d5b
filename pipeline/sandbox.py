"""A jail for code that a model wrote: it sees no network, no file and no process of this machine, and has limits.

Linux namespaces through util-linux. The root of its file system is 16 MiB of memory with the system's libraries and
this Python, read-only; `timeout` is its first process, so that the kernel ends all others with it.
"""

import ctypes
import inspect
import json
import os
import re
import resource
import secrets
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

from instruments.errors import ConfigError

SECONDS = 10
LIMITS = {
    "RLIMIT_AS": 512 * 2**20,
    "RLIMIT_CPU": SECONDS,
    "RLIMIT_FSIZE": 2**20,  # of each file, and of what it prints
    "RLIMIT_NOFILE": 64,
    "RLIMIT_CORE": 0,
    "RLIMIT_NPROC": 0,  # no other process or thread
}
SOLVED, LATE, ENDED = "solved", "killed or too slow", "ended early"
# $1: an empty folder; $2: Python's prefix; the rest: the command in the jail.
_BUILD = """set -e
root=$1; prefix=$2; shift 2
cd /proc/sys/kernel; echo 0 > shmmni; echo 0 > msgmni; echo 0 0 0 0 > sem  # memory that no limit counts
cd /
mount -t tmpfs -o size=16m,nr_inodes=1k,nosuid,nodev,mode=755 jail "$root"
mkdir -m 1777 "$root/tmp"
for part in /usr /bin /sbin /lib /lib64 "$prefix"; do
  if [ -L "$part" ]; then cp -P "$part" "$root$part"
  elif [ -d "$part" ]; then mkdir -p "$root$part"; mount -o bind,ro,nosuid,nodev "$part" "$root$part"; fi
done
exec chroot "$root" "$@"
"""
_NAMESPACES = ["unshare", "--net", "--ipc", "--uts", "--pid", "--mount", "--fork", "--kill-child"]
_WITHOUT_RIGHTS = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
_NOBODY = ["--reuid=65534", "--regid=65534", "--clear-groups"]


def judge(code: str, tests: str) -> str:
    """Run `code`, then `tests`, in the jail.

    Returns:
        SOLVED: all asserts held, and our own code, which runs after them, printed a token that is random each time.
        Otherwise LATE, ENDED (the process ended before), or the class of an error, such as "raised AssertionError".

    It trusts an answer that searches the interpreter's memory for the token, or whose objects equal everything.
    """
    return _run(code, tests)[0]


def require_jail() -> None:
    """Raise ConfigError: this machine has no jail, found by one right and one wrong answer."""
    for tests, wanted in (("assert x == 1", SOLVED), ("assert x == 2", "raised AssertionError")):
        found, said = _run("x = 1", tests)
        if found != wanted:
            what = f"code that a model wrote cannot be shut in on this machine: {said or found}"
            do = "on Linux with util-linux and its rights: --run-code without CHECKPOINT, for the answers in --out"
            raise ConfigError(what, where="--run-code", do=do)


def _run(code: str, tests: str) -> tuple[str, str]:
    """The verdict, and the first line on stderr."""
    token, root, prefix = secrets.token_hex(16), os.geteuid() == 0, os.path.realpath(sys.base_prefix)
    # Root becomes nobody; another user becomes root of a namespace of users, without rights in it.
    outside = [*_NAMESPACES, *([] if root else ["--map-root-user"]), "sh", "-c", _BUILD, "sh"]
    # `timeout` keeps its rights, so that the answer cannot trace it and outlive it.
    inside = ["timeout", "-s", "KILL", str(SECONDS), *_WITHOUT_RIGHTS, *(_NOBODY if root else [])]
    inside += ["env", "-i", "OPENBLAS_NUM_THREADS=1"]  # numpy, if it is there, would start threads when it is imported
    program = f"import ctypes, json, os, resource, sys\n{inspect.getsource(_run_answer)}_run_answer()"
    python = [str(Path(sys.executable).resolve()), "-I", "-c", program]
    request = json.dumps({"token": token, "code": code, "tests": tests, "limits": LIMITS})
    with TemporaryDirectory() as folder, TemporaryFile() as out, TemporaryFile() as errors:
        try:
            status = subprocess.run(
                [*outside, folder, prefix, *inside, *python], input=request.encode(), stdout=out,
                stderr=errors, check=False, env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}, timeout=SECONDS + 5,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            return LATE, ""
        except OSError as error:
            return ENDED, str(error)
        for file in (out, errors):
            file.seek(0)
        said, complaint = out.read(100).decode(errors="replace"), errors.read(1000).decode(errors="replace")
    if said == token:
        verdict = SOLVED
    elif re.fullmatch(r"[A-Za-z_]\w{0,60}", said, re.ASCII):
        verdict = f"raised {said}"
    else:
        verdict = LATE if status in {124, 137} else ENDED
    return verdict, complaint.strip().partition("\n")[0]


def _run_answer() -> None:
    """The text of this function is the program in the jail: it runs the answer on stdin, then its asserts.

    It writes the token if all asserts held, else the name of the error's class; nothing if the answer ends the process.
    """
    request = json.loads(sys.stdin.read())
    token = request["token"].encode()
    # Taken before the answer runs, since it can replace what modules and builtins hold.
    execute, write, leave, untrace, out = exec, os.write, os._exit, sys.settrace, os.dup(1)
    os.dup2(2, 1)
    os.chdir("/tmp")
    # A new session keyring of the kernel: the caller's may hold keys, such as Kerberos tickets.
    ctypes.CDLL(None).syscall({"x86_64": 250}.get(os.uname().machine, 219), 1, None)
    for limit, most in request["limits"].items():
        resource.setrlimit(getattr(resource, limit), (most, most))
    tests = compile(request["tests"], "tests", "exec")
    names = {"__name__": "answer"}
    try:
        execute(compile(request["code"], "answer", "exec"), names)
        untrace(None)  # it could jump over asserts
        execute(tests, names)
    except BaseException as error:  # noqa: BLE001 - also SystemExit
        write(out, type(error).__name__.encode())
        leave(1)
    write(out, token)
    leave(0)
