"""Captured tensors in host memory, and the thread that measures them and writes them: bytes before index rows."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from instruments.errors import ContractError, UserError
from instruments.files import sync, whole_file
from instruments.safetensors_files import checksum_of
from instruments.tensor_dump.config import DumpConfig
from instruments.tensor_dump.index import FORMAT, STORED, VERSION, Manifest, Statistics, TensorRecord


class HostMemory:
    """Counts the bytes of captures that wait to be written, at most `capacity`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = self.most_used = 0
        self._changed = Condition()

    def reserve(self, size: int, *, wait: bool = False) -> bool:
        """Whether there was room for `size` bytes, which are now reserved; `wait` blocks until there is."""
        with self._changed:
            while self.used + size > self.capacity:
                if not wait:
                    return False
                self._changed.wait()
            self.used += size
            self.most_used = max(self.most_used, self.used)
            return True

    def release(self, size: int) -> None:
        """Give up reserved bytes."""
        with self._changed:
            self.used -= size
            self._changed.notify_all()


@dataclass(eq=False)
class Held:
    """Content copied or measured once and shared by its records; the writer fills in `found`."""

    status: str
    data: Tensor | None = None  # on the CPU; with status statistics the moments, unless `found` has them
    reserved: int = 0  # bytes of the host memory
    wait: Callable[[], None] | None = None  # call before reading `data`; None where the copy is complete
    found: dict[str, Any] = field(default_factory=dict)  # statistics, file, key, checksum for its records


_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def copy_to_host(tensor: Tensor) -> tuple[Tensor, Callable[[], None] | None]:
    """A row-major copy, safe from later changes of the tensor; and a function that waits for it (None: done)."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    if not tensor.is_cuda:
        return host.copy_(tensor), None
    # Clone in the current stream, so that the next kernel may overwrite it; copy to the host in another stream.
    own = tensor.clone(memory_format=torch.contiguous_format)
    stream = _STREAMS.setdefault(tensor.device, torch.cuda.Stream(tensor.device))
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    done = torch.cuda.Event()
    with torch.cuda.stream(stream):
        host.copy_(own, non_blocking=True)
        done.record(stream)
    own.record_stream(stream)
    return host, done.synchronize


# Below this share of mean², the variance cannot be computed as a difference of two sums.
_CANCELLATION = 0.01
# Values that are read at a time, 512 KiB in float32: they stay in the cache.
_PIECE = 2**17


@torch.no_grad()
def measure(tensor: Tensor) -> Statistics:
    """Statistics of a tensor on the CPU, over its finite values.

    Numerics: sums of 2^17 values in float32, their sums in float64; mean within 1e-5 of the root mean square, deviation
        within a relative 1e-3. Where this could fail (mean far larger than the deviation, overflow, values that are not
        finite), all is computed in float64.
    """
    if not tensor.numel():
        return Statistics(None, None, None, None, 0)
    flat = _flatten(tensor)
    low, high, total, square = math.inf, -math.inf, 0.0, 0.0
    for piece in flat.split(_PIECE):
        values = piece.float()
        least, most = torch.aminmax(values)
        low, high = min(low, least.item()), max(high, most.item())
        total += values.sum().item()
        square += torch.dot(values, values).item()
    mean = total / flat.numel()
    variance = square / flat.numel() - mean**2
    if not math.isfinite(square) or variance < _CANCELLATION * mean**2:
        return read_moments(exact_moments(flat), flat.numel())
    return Statistics(low, high, mean, math.sqrt(variance), 0)


def _flatten(tensor: Tensor) -> Tensor:
    """All values in memory order, without a copy if there are no gaps; statistics do not depend on the order."""
    axes = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(axes).reshape(-1)


@torch.no_grad()
def exact_moments(tensor: Tensor) -> Tensor:
    """``(5,)`` minimum, maximum, mean and deviation of the finite values, and the number of others.

    On the tensor's device, without synchronisation; the minimum is infinite if no value is finite.
    Numerics: float64 on the CPU, float32 elsewhere; the deviation is computed from the mean in a second pass.
    """
    values = tensor.double() if tensor.device.type == "cpu" else tensor.float()
    if not values.numel():
        return values.new_tensor([math.inf, -math.inf, 0.0, 0.0, 0.0])
    finite = values.isfinite()
    count = finite.sum()
    mean = torch.where(finite, values, 0).sum() / count
    deviation = (torch.where(finite, values - mean, 0).square().sum() / count).sqrt()
    low, high = torch.where(finite, values, math.inf).amin(), torch.where(finite, values, -math.inf).amax()
    # The others are few: in float32 the count of the finite values would not be exact above 2^24.
    return torch.stack([low, high, mean, deviation, (~finite).sum().to(values.dtype)])


def read_moments(moments: Tensor, size: int) -> Statistics:
    """Statistics from the moments that `exact_moments` computed of a tensor of `size` values."""
    low, high, mean, deviation, nonfinite = moments.tolist()
    if low == math.inf:
        return Statistics(None, None, None, None, size)
    return Statistics(low, high, mean, deviation, int(nonfinite))


# One tensor of one call: its record, still incomplete, and its content.
Capture = tuple[TensorRecord, Held]


# A file is closed when it holds this many bytes, or this many rows wait for it: rows without bytes would never be
# written. A closed file survives a kill.
SHARD_BYTES = 64 * 2**20
_ROWS = 1000


class DumpWriter:
    """Writes captures in the order of `put`; `close` waits until all are on the disk."""

    def __init__(
        self, folder: Path, rank: int, header: Mapping[str, Any], config: DumpConfig, manifest: Manifest
    ) -> None:
        """Create the index and start the thread, which frees `memory` and counts captures in the `manifest`.

        Raises ContractError: the folder has a dump of this rank, finished or not.
        """
        self.failure: BaseException | None = None  # of the thread; later captures count as lost
        self.memory = HostMemory(config.memory_mib * 2**20)
        self._folder, self._rank = folder, rank
        path = folder / f"index-{rank:05}.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._index = path.open("xb")
        except FileExistsError:
            do = "another folder for every dump; processes of one job need torch.distributed to tell ranks"
            raise ContractError("the folder holds a dump already", where=str(path), do=do) from None
        self._append([{"format": FORMAT, "version": VERSION, "rank": rank, **header}])
        sync(folder)
        self._config, self.manifest = config, manifest
        self._queue: SimpleQueue[Capture | Literal["seal"] | None] = SimpleQueue()
        # Of the next file: its tensors, their bytes, the rows that wait for it and the memory that it frees.
        self._tensors: dict[str, Tensor] = {}
        self._bytes = 0
        self._rows: list[TensorRecord] = []
        self._reserved = 0
        self._shards = 0
        self._thread = Thread(target=self._work, name="tensor dump", daemon=True)
        self._thread.start()

    def put(self, capture: Capture) -> None:
        """Queue a capture."""
        self._queue.put(capture)

    def flush(self) -> None:
        """Close the current file behind all captures so far."""
        self._queue.put("seal")

    def close(self) -> None:
        """Write everything queued and end the thread."""
        self.flush()
        self._queue.put(None)
        self._thread.join()
        self._index.close()

    def check(self) -> None:
        """Raise the thread's error. Raises UserError: the disk is full or not writable."""
        if self.failure is None:
            return
        if not isinstance(self.failure, OSError | SafetensorError):
            raise self.failure
        raise UserError(
            f"the dump ended early, {self.manifest.lost} tensors are lost: {self.failure}",
            where=f"{self._folder}; tensors listed in its index are complete",
            do="free some space or dump into another folder; or dump less: modules=[...], fewer steps, max_tokens=, "
            "keep=statistics",
        ) from self.failure

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if item != "seal":
                    self._add(*item)
                full = len(self._rows) >= _ROWS or self._bytes >= SHARD_BYTES
                if full or item == "seal" or self.failure is not None:
                    self._seal()
            except BaseException as error:  # noqa: BLE001 - raised again by `check`
                self.failure = error
                self.manifest.lost += len(self._rows)
                self._release()  # or training would wait for memory

    def _add(self, record: TensorRecord, held: Held) -> None:
        # Once for all records that share the content; the recorder holds it until the step ends.
        self._reserved, held.reserved = self._reserved + held.reserved, 0
        data, held.data = held.data, None
        if self.failure is not None:
            self.manifest.lost += 1
            return
        if data is not None:
            if held.wait is not None:
                held.wait()
            if held.status == STORED:
                held.found = self._place(record.name, data)
            else:
                held.found = {"statistics": read_moments(data, math.prod(record.shape))}
        record = replace(record, **held.found)
        self.manifest.add(record, bytes_wanted=self._config.keep == "tensors")
        self._rows.append(record)

    def _place(self, key: str, tensor: Tensor) -> dict[str, Any]:
        """Add a tensor to the file; returns the fields of its record."""
        self._tensors[key] = tensor
        self._bytes += tensor.nbytes
        return {
            "statistics": measure(tensor), "file": self._shard_name(), "key": key, "checksum": checksum_of(tensor)
        }  # fmt: skip

    def _shard_name(self) -> str:
        return f"tensors-{self._rank:05}-{self._shards:05}.safetensors"

    def _seal(self) -> None:
        """Write the bytes, then the rows that refer to them."""
        if self._tensors:
            with whole_file(self._folder / self._shard_name()) as unfinished:
                save_file(self._tensors, unfinished, metadata={"format": "pt"})
                unfinished.chmod(os.fstat(self._index.fileno()).st_mode & 0o777)  # safetensors ignores the umask
            self._shards += 1
        if self._rows:
            self._append([record.to_row() for record in self._rows])
        self._release()

    def _append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows to the index; they are on the disk on return."""
        self._index.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
        self._index.flush()
        os.fsync(self._index.fileno())

    def _release(self) -> None:
        self._tensors, self._rows, self._bytes = {}, [], 0
        self.memory.release(self._reserved)
        self._reserved = 0
