"""The thread that measures captures and writes them to the disk; the manifest, expected against captured."""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from instruments.durable import whole_file
from instruments.errors import UserError, some
from instruments.safetensors_reader import checksum_of
from instruments.tensor_dump.capture import (
    Capture,
    Facts,
    Held,
    HostRing,
    RankInfo,
    Rounded,
    Slot,
    Watched,
    make_record,
    make_rounded_record,
)
from instruments.tensor_dump.config import BACKWARD, DumpConfig
from instruments.tensor_dump.index import DROPPED, STATISTICS, STORED, IndexFile, TensorRecord, make_name
from instruments.tensor_dump.statistics import measure, read_moments, round_into


@dataclass
class Findings:
    """Counted by the writer, capture by capture."""

    captured: Counter[tuple[str, str]] = field(default_factory=Counter)  # (module, tensor) → times
    zero_gradients: list[str] = field(default_factory=list)  # names of records
    nonfinite: list[str] = field(default_factory=list)
    status: Counter[str] = field(default_factory=Counter)
    lost: int = 0  # captured, and then the disk failed

    def add(self, name: str, capture: Capture) -> None:
        """Count one."""
        source, statistics = capture.source, capture.held.statistics
        self.captured[source.module, source.tensor] += 1
        self.status[capture.held.status] += 1
        if statistics is None:
            return
        if statistics.nonfinite:
            self.nonfinite.append(name)
        elif source.direction == BACKWARD and statistics.all_zero:
            self.zero_gradients.append(name)


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Manifest:
    """What was to be captured by one process, and what was."""

    steps: int  # that were dumped
    expected: dict[str, list[str]]  # module → tensors
    captured: dict[str, dict[str, int]]  # module → tensor → times
    never_fired: list[str]  # modules that gave nothing
    missing: dict[str, list[str]]  # module that fired → tensors that it never gave
    zero_gradients: list[str]  # names of records
    nonfinite: list[str]
    dropped: int
    statistics_only: int
    lost: int  # to a disk that failed
    unseen_weights: list[str]  # matrices that no watched kind of module holds

    @classmethod
    def of(
        cls, watched: Sequence[Watched], findings: Findings, config: DumpConfig, *, steps: int, unseen: Sequence[str]
    ) -> "Manifest":
        """Compare."""
        expected = {one.name: list(one.expected(config)) for one in watched}
        captured = {
            name: {tensor: findings.captured[name, tensor] for tensor in tensors if findings.captured[name, tensor]}
            for name, tensors in expected.items()
        }
        missing = {name: [tensor for tensor in expected[name] if tensor not in captured[name]] for name in expected}
        return cls(
            steps=steps,
            expected=expected,
            captured=captured,
            never_fired=[name for name, found in captured.items() if not found] if steps else [],
            missing={name: tensors for name, tensors in missing.items() if tensors and captured[name]},
            zero_gradients=findings.zero_gradients,
            nonfinite=findings.nonfinite,
            dropped=findings.status[DROPPED],
            statistics_only=findings.status[STATISTICS],
            lost=findings.lost,
            unseen_weights=list(unseen),
        )

    def write(self, folder: Path, rank: int) -> None:
        """As `manifest-<rank>.json`."""
        path = folder / f"manifest-{rank:05}.json"
        with whole_file(path) as unfinished:
            unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    def complaints(self, config: DumpConfig) -> list[str]:
        """In words, what the user should know."""
        found = {
            "modules never fired": self.never_fired,
            "modules gave no": [f"{name}: {', '.join(tensors)}" for name, tensors in self.missing.items()],
            "gradients are zero everywhere": self.zero_gradients,
            "tensors hold values that are not finite": self.nonfinite,
        }
        said = [] if self.steps else ["no step was dumped: see first_step and every_steps"]
        said += [f"{len(names)} {what}: {some(names)}" for what, names in found.items() if names]
        if self.dropped:
            said.append(f"{self.dropped} tensors dropped: the memory of {config.memory_mib} MiB was full")
        if self.statistics_only and config.keep == "tensors":
            said.append(f"of {self.statistics_only} tensors only statistics were kept: the memory was full")
        if self.lost:
            said.append(f"{self.lost} tensors lost to a disk that failed")
        return said


def warn_of(manifest: Manifest, config: DumpConfig, folder: Path) -> None:
    """Say it in the log."""
    for complaint in manifest.complaints(config):
        logger.warning("tensor dump %s: %s", folder, complaint)


def shard_name(rank: int, number: int) -> str:
    """Of a process's files, in the order it wrote them."""
    return f"tensors-{rank:05}-{number:05}.safetensors"


def save_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write contiguous tensors; after an error or a kill there is no file of this name.

    Raises:
        OSError, SafetensorError: the disk is full or forbids it.
    """
    with whole_file(path) as unfinished:
        save_file(dict(tensors), unfinished, metadata={"format": "pt"})


# Rows that wait for a file to be closed, at most; those without bytes would wait forever.
_ROWS = 1000


class DumpWriter:
    """Takes captures in their order; `close` waits until all are on the disk."""

    def __init__(
        self,
        folder: Path,
        index: IndexFile,
        ring: HostRing,
        config: DumpConfig,
        identity: RankInfo,
        metadata: Mapping[str, Any],
    ) -> None:
        """Start the thread."""
        self.findings = Findings()
        self.failure: BaseException | None = None  # of the thread; what comes after it is counted as lost
        self.told = False  # whether the thread that trains knows of it
        self._folder, self._index, self._ring = folder, index, ring
        self._config, self._identity, self._metadata = config, identity, dict(metadata)
        self._queue: SimpleQueue[Capture | Event] = SimpleQueue()
        # Of the file to come: its tensors, their bytes, the rows that wait for it and the memory that it will free.
        self._tensors: dict[str, Tensor] = {}
        self._bytes = 0
        self._rows: list[TensorRecord] = []
        self._slots: list[Slot] = []
        self._shards = 0
        self._closing = False
        self._thread = Thread(target=self._work, name="tensor dump", daemon=True)
        self._thread.start()

    def put(self, capture: Capture) -> None:
        """Hand over a capture."""
        self._queue.put(capture)

    def flush(self) -> Event:
        """Close the file after what was put so far; the event is set when that is on the disk."""
        done = Event()
        self._queue.put(done)
        return done

    def close(self) -> None:
        """Write what is left and end the thread."""
        self._closing = True
        self.flush()
        self._thread.join()

    def _work(self) -> None:
        while True:
            item = self._queue.get()
            try:
                self._take_up(item)
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that trains
                self.failure = error
                self._lose()
            if isinstance(item, Event):
                item.set()
                if self._closing and self._queue.empty():
                    return

    def _take_up(self, item: Capture | Event) -> None:
        if isinstance(item, Capture):
            if item.held.slot is not None:
                self._slots.append(item.held.slot)
            if self.failure is None:
                self._add(item)
            else:
                self.findings.lost += 1
        full = len(self._rows) >= _ROWS or self._bytes >= self._config.shard_mib * 2**20
        if full or isinstance(item, Event) or self.failure is not None:
            self._seal()

    def _add(self, capture: Capture) -> None:
        held, facts = capture.held, capture.facts
        name = make_name(capture.timestamp, capture.counter, capture.source, facts.quant_type)
        self._fill_in(held, name, facts)
        self.findings.add(name, capture)
        record = make_record(name, capture, self._identity, self._config.quant_type, self._metadata)
        self._rows.append(record)
        if held.rounded is not None:
            self._rows.append(make_rounded_record(record, capture, held.rounded))

    def _fill_in(self, held: Held, name: str, facts: Facts) -> None:
        """Measure the content and give it a place in the file; once for all who share it."""
        if held.statistics is not None or held.data is None:
            return
        if held.wait is not None:
            held.wait()
        if held.status != STORED:
            held.statistics = read_moments(held.data, prod(facts.shape))
            return
        held.statistics = measure(held.data)
        held.file, held.key = self._keep(name, held.data), name
        held.checksum = checksum_of(held.data)
        wanted = self._config.quant_type
        if self._config.fake_quant and wanted not in {None, facts.quant_type} and held.data.is_floating_point():
            rounded, error = round_into(held.data, str(wanted))
            key = f"{name}.{wanted}"
            held.rounded = Rounded(
                str(wanted), measure(rounded), error, self._keep(key, rounded), key, checksum_of(rounded), rounded.dtype
            )

    def _keep(self, key: str, tensor: Tensor) -> str:
        self._tensors[key] = tensor
        self._bytes += tensor.nbytes
        return shard_name(self._identity.rank, self._shards)

    def _seal(self) -> None:
        """Bytes first, then the rows that speak of them."""
        if self._tensors:
            save_shard(self._folder / shard_name(self._identity.rank, self._shards), self._tensors)
            self._shards += 1
        if self._rows:
            self._index.add(self._rows)
        self._release()

    def _release(self) -> None:
        self._tensors, self._rows, self._bytes = {}, [], 0
        for slot in self._slots:
            self._ring.release(slot)
        self._slots = []

    def _lose(self) -> None:
        """After a failure: nobody must wait for memory, and what is lost is counted."""
        self.findings.lost += len(self._rows)
        self._release()


def explain_failure(writer: DumpWriter, folder: Path) -> None:
    """Raise what the writer met, once.

    Raises:
        UserError: the disk is full or forbids writing.
    """
    failure = writer.failure
    if failure is None or writer.told:
        return
    writer.told = True
    if not isinstance(failure, OSError | SafetensorError):
        raise failure
    raise UserError(
        f"the dump ended early, {writer.findings.lost} tensors are lost: {failure}",
        where=f"{folder}; what its index lists is whole",
        do="free some space or dump into another folder; or dump less: modules=[...], max_steps=, max_tokens=, "
        "keep=statistics",
    ) from failure
