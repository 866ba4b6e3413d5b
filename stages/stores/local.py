"""Checkpoints of running sums in a local file, always whole."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

Counters = Mapping[str, int | float]


class LocalStore:
    """The running sums of one scan in `folder/sums.safetensors`.

    The file is replaced atomically, so a reader finds the old state or the new one, never half of one. Position and
    sums stand in the same file: a resumed scan can neither lose a batch nor count one twice.
    """

    def __init__(self, folder: Path, *, every: float) -> None:
        """Keep the state in `folder`, at most every `every` seconds."""
        self.path = folder / "sums.safetensors"
        self.every = every
        self.last = time.monotonic()

    def load(self) -> tuple[dict[str, Tensor], dict[str, int | float]] | None:
        """The state of an earlier run, or None."""
        if not self.path.exists():
            return None
        with safe_open(self.path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no dict
            counters = json.loads(file.metadata()["counters"])
        return tensors, counters

    def save_if_due(self, tensors: Mapping[str, Tensor], counters: Counters) -> None:
        """Write the state if the last write lies long enough back."""
        if time.monotonic() - self.last >= self.every:
            self.save(tensors, counters)
            self.last = time.monotonic()

    def save(self, tensors: Mapping[str, Tensor], counters: Counters) -> None:
        """Write the state: to a temporary file, to the disk, then in place of the old one."""
        temporary = self.path.with_suffix(".tmp")
        save_file(dict(tensors), temporary, metadata={"counters": json.dumps(dict(counters))})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(self.path)
