"""Damaged and hostile variants of files, from fixed seeds; limits for the programs that read them."""

import copy
import json
import time
from collections import Counter
from pathlib import Path

from instruments.errors import UserError

SECONDS = 5  # processor time, so that other programs do not count
WAITED = 60  # wall-clock seconds
BYTES = 2**30  # memory that a reader may add to the process
HOSTILE = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 0.5, 1e308, float("nan"), float("inf"), float("-inf"), "", "x",
    ".", "..", "../x", "/tmp/x", "a/b", "a\0b", "\ud800", "\x1b[2J", "-1", "1e9", "a" * 300, [], [[]], [None], [0, 0],
    [-1], [2**62], {}, {"a": 1}, {"file": "../x"},
)  # fmt: skip


def mutate_bytes(random, data):
    """Apply one to three of: flip a bit, overwrite, truncate, delete, repeat or insert bytes."""
    data = bytearray(data)
    for _ in range(random.randint(1, 3)):
        at = random.randrange(max(len(data), 1))
        length = random.choice([1, 1, 2, 8, 40, random.randrange(max(len(data), 1)) + 1])
        kind = random.randrange(6)
        if kind == 0 and data:
            data[at] ^= 1 << random.randrange(8)
        elif kind == 1:
            data[at : at + length] = random.randbytes(min(length, len(data) - at))
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            del data[at : at + length]
        elif kind == 4:
            data[at:at] = data[at : at + length]
        else:
            data[at:at] = random.choice([b"\0", b"\xff" * 8, b"\n", b"{", b"MSEG", random.randbytes(16)])
    return bytes(data)


def mutate_json(random, value):
    """A copy with one to three values replaced, deleted or duplicated; rarely a hostile value alone."""
    value = copy.deepcopy(value)
    for _ in range(random.randint(1, 3)):
        places = list(_places(value))
        if not places or random.random() < 0.02:
            return copy.deepcopy(random.choice(HOSTILE))
        parent, key = random.choice(places)
        kind = random.randrange(8)
        if kind < 5:
            parent[key] = copy.deepcopy(random.choice(HOSTILE))
        elif kind == 5:
            del parent[key]
        elif isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        else:
            parent[f"{key}_"] = copy.deepcopy(parent[key])
    return value


def mutate_shard_header(random, data):
    """A safetensors file with a mutated header of the right length."""
    length = int.from_bytes(data[:8], "little")
    text = json.dumps(mutate_json(random, json.loads(data[8 : 8 + length]))).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def _places(value):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield value, key
        yield from _places(part)


class Trials:
    """Counts the outcomes of reading mutants; `failures` counts everything except a result and a UserError."""

    def __init__(self):
        self.tried, self.refused, self.failures = 0, 0, Counter()
        self.slowest, self.largest = 0.0, 0  # seconds, bytes

    def run(self, read):
        """Call `read`; returns its result, or None if it refused or failed."""
        self.tried += 1
        held, began, busy = reset_peak(), time.monotonic(), time.process_time()
        found = None
        try:
            found = read()
        except UserError:
            self.refused += 1
        except Exception as error:  # noqa: BLE001 - every other exception is a finding
            frame = error.__traceback__
            while frame.tb_next is not None:
                frame = frame.tb_next
            place = f"{frame.tb_frame.f_code.co_filename.rpartition('/')[2]}:{frame.tb_lineno}"
            self.failures[f"{type(error).__name__} at {place}"] += 1
        seconds, taken = time.process_time() - busy, resident("VmHWM") - held
        self.failures["slow"] += seconds > SECONDS or time.monotonic() - began > WAITED
        self.failures["large"] += taken > BYTES
        self.slowest, self.largest = max(self.slowest, seconds), max(self.largest, taken)
        return found

    def __repr__(self):
        failed = f"{sum(self.failures.values())} failed: {dict(+self.failures)}"
        return (
            f"{self.tried} tried, {self.refused} refused, {failed}; "
            f"slowest {self.slowest:.1f} s, largest {self.largest / 2**20:.0f} MiB"
        )


def reset_peak():
    """Reset this process's peak memory to the memory held now; returns that in bytes. Linux only."""
    if (peak := Path("/proc/self/clear_refs")).exists():
        peak.write_text("5")
    return resident("VmRSS")


def resident(name):
    """Bytes of `VmRSS` (memory now) or `VmHWM` (peak memory) of this process; 0 if there is no /proc."""
    if not (status := Path("/proc/self/status")).exists():
        return 0
    return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith(name))
