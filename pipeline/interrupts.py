"""Ctrl-C: answered at once, also inside a long call of a library; a second one leaves at once."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

from instruments.errors import INTERRUPTED

STOPPING = "\nstopping when the running step ends; Ctrl-C again leaves at once, and what is published stays\n"


@contextmanager
def answered_interrupts() -> Iterator[None]:
    """Answer SIGINT from a thread, since Python's own handler has to wait for the end of compiled code.

    Does nothing where another program handles the signal, or ignores it.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    Thread(target=_answer, args=(reading,), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writing)


def _answer(reading: int) -> None:
    stopping = False
    while signals := os.read(reading, 1):
        if signals[0] != signal.SIGINT:
            continue
        if stopping:
            os._exit(INTERRUPTED)
        stopping = True
        sys.stderr.write(STOPPING)
        sys.stderr.flush()
    os.close(reading)
