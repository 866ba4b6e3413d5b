"""What a model has written so far, on disk: a killed run goes on where it stopped.

A line of JSON for each batch, prompt number to token ids, made to last before the next batch; the first line says what
the numbers stand for. A line that a kill cut short is dropped.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from instruments.errors import ContractError

Written = dict[int, list[int]]


class WrittenFile:
    """A file of continuations."""

    def __init__(self, path: Path, facts: Mapping[str, object]) -> None:
        """Name the file.

        Args:
            path: made when the first batch is added.
            facts: what the continuations depend on; plain JSON.
        """
        self.path, self.facts = path, json.loads(json.dumps(facts))

    def read(self) -> Written:
        """All that is there.

        Raises:
            ContractError: the file belongs to other facts, or is damaged before its last line.
        """
        content = self.path.read_bytes() if self.path.exists() else b""
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            # What comes next must begin on a line of its own.
            os.truncate(self.path, whole)
        written: Written = {}
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            record = self._parse(line, number)
            if number == 1:
                self._compare(record)
            else:
                written |= {int(prompt): ids for prompt, ids in record.items()}
        return written

    def add(self, written: Written) -> None:
        """Add a batch, and return once it will survive a crash."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            records = [self.facts, written] if file.tell() == 0 else [written]
            file.write("".join(json.dumps(record) + "\n" for record in records).encode())
            file.flush()
            os.fsync(file.fileno())

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise ContractError(
                "the file of what the model has written is damaged",
                where=f"{self.path}:{number}",
                do=f"rm {self.path}   (the model then writes it again)",
            )
        return record

    def _compare(self, found: Mapping[str, object]) -> None:
        names = sorted(name for name in {*found, *self.facts} if found.get(name) != self.facts.get(name))
        if names:
            differences = ", ".join(f"{name}: {found.get(name)} there, {self.facts.get(name)} here" for name in names)
            raise ContractError(
                "the file of what the model has written belongs to other text or settings",
                where=f"{self.path}; {differences}",
                do=f"rm {self.path}   (the model then writes it again)",
            )
