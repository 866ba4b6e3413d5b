"""Ctrl-C inside a call of compiled code, which Python's own handler cannot answer."""

import signal
import subprocess
import sys
import time

CODE = """
import hashlib, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background of a shell ignore it
from pipeline.interrupts import answered_interrupts
try:
    with answered_interrupts():
        print("running", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"a", b"b", int(sys.argv[1]))
except KeyboardInterrupt:
    sys.exit(3)
"""


def start(rounds):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", CODE, str(rounds)], **pipes)
    assert process.stdout.readline() == "running\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == "\n"
    assert process.stderr.readline().startswith("stopping when the running step ends")
    return process


def test_the_first_is_answered_at_once_and_the_second_leaves():
    process = start(10**9)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130


def test_the_first_alone_ends_the_step_in_order():
    process = start(10**6)
    process.communicate(timeout=60)
    assert process.returncode == 3


def test_a_program_that_ignores_the_signal_goes_on_ignoring_it():
    code = CODE.replace("signal.default_int_handler)", "signal.SIG_IGN)")
    process = subprocess.Popen([sys.executable, "-c", code, str(10**6)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0
