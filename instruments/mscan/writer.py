"""Write what the scanner finds, so that a kill costs the unsealed segment at most."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from instruments.errors import ContractError
from instruments.mscan.header import ENCODINGS, Header, ParameterTable
from instruments.mscan.rows import TOKEN_ARRAYS, Rows, StoredSequence, array_widths
from instruments.mscan.segment_file import SegmentBuffer, SegmentFile
from instruments.parameter_scan.targets import ScanRecord, WatchedParameter


class MscanWriter:
    """An .mscan file being written; `with` closes it. What was added is safe once its segment is sealed."""

    def __init__(
        self,
        path: Path,
        parameters: Sequence[WatchedParameter],
        *,
        model: str,
        block_width: int,
        encoding: str = "log16",
        segment_sequences: int = 1024,
        per_token: bool = False,
        metadata: Mapping[str, Any] | None = None,
        created: str | None = None,
        append: bool = False,
    ) -> None:
        """Create the file, or go on with one.

        Args:
            path: of the file.
            parameters: the scanner's, in the order of its records' columns.
            model: name of the scanned model.
            block_width: columns or rows of a block.
            encoding: log16 (2 bytes a value, SPECIFICATION.md states the error) or f32 (lossless).
            segment_sequences: sequences that are sealed together; a segment is also sealed at 64 MiB.
            per_token: keep the values per token, too.
            metadata: anything that JSON can hold.
            created: ISO 8601; now, unless said.
            append: go on with the file if it is there; a torn tail is cut off, with a warning.

        Raises:
            ContractError: the file is there already; or, with `append`, it has other parameters, or is damaged.
        """
        if encoding not in ENCODINGS:
            raise ContractError(
                f"encoding={encoding} is none of {', '.join(ENCODINGS)}", where=str(path), do="encoding=log16"
            )
        now = datetime.now(UTC).isoformat(timespec="seconds")
        table = ParameterTable.of(parameters, block_width)
        header = Header(model, created or now, table, encoding, per_token, dict(metadata or {}))
        open_file = SegmentFile.reopen if append and path.exists() else SegmentFile.create
        self._file = open_file(path, header)
        self._buffer = SegmentBuffer(self._file, segment_sequences)
        self._next = self._file.next_number

    def add(self, record: ScanRecord, numbers: Sequence[int] | None = None) -> None:
        """Take over the sequences of a record; whole segments are sealed.

        Args:
            record: of the scanner whose parameters the file has.
            numbers: of the record's sequences in the whole scan; counted on from the last, unless given.

        Raises:
            ContractError: shapes that do not fit the parameter table, or a value that is no norm.
        """
        start = self._next
        numbers = range(start, start + len(record.sequences)) if numbers is None else numbers
        rows = _rows_of(self._file.header, record, numbers)
        _check(self._file, rows)
        self._buffer.add(rows)
        self._next = max(start, *(number + 1 for number in numbers)) if len(numbers) else start

    def seal(self) -> None:
        """Bring everything added so far to the disk, as a segment of its own."""
        self._buffer.seal()

    def close(self) -> None:
        """Seal the rest and close the file."""
        try:
            self.seal()
        finally:
            self._file.close()

    def __enter__(self) -> "MscanWriter":
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an error, too, what was added is kept."""
        self.close()


def _rows_of(header: Header, record: ScanRecord, numbers: Sequence[int]) -> Rows:
    """Copies, because the scanner may use its buffers again."""
    assert len(numbers) == len(record.sequences), "one number per sequence"
    sequences = tuple(
        StoredSequence(int(number), sequence.name, sequence.tokens, sequence.source)
        for number, sequence in zip(numbers, record.sequences, strict=True)
    )
    arrays = {
        "activation": _copy(record.activation_BP),
        "gradient": _copy(record.gradient_BP),
        "in_activation": _copy(record.in_activation_BI),
        "in_gradient": _copy(record.in_gradient_BI),
        "out_gradient": _copy(record.out_gradient_BO),
    }
    if header.per_token:
        if record.token_activation is None or record.token_gradient is None:
            raise ContractError(
                "the record holds no values per token", where="MscanWriter(per_token=True)", do="per_token=False"
            )
        parameters = len(header.table.entries)
        arrays["token_activation"] = _stack(record.token_activation, parameters)
        arrays["token_gradient"] = _stack(record.token_gradient, parameters)
    return Rows(sequences, arrays)


def _copy(values: Tensor) -> NDArray[np.float32]:
    return np.array(values.detach().numpy(), np.float32)


def _stack(values: Sequence[Tensor], columns: int) -> NDArray[np.float32]:
    return np.concatenate([np.empty((0, columns), np.float32), *(value.detach().numpy() for value in values)])


def _check(file: SegmentFile, rows: Rows) -> None:
    """Raise ContractError where an array has another shape than the tables say, or holds what no norm can be."""
    tokens = sum(sequence.tokens for sequence in rows.sequences)
    for name, columns in array_widths(file.header).items():
        values = rows.arrays[name]
        expected = (tokens if name in TOKEN_ARRAYS else len(rows.sequences), columns)
        if values.shape != expected:
            raise ContractError(
                f"{name} is {list(values.shape)}; the tables say {list(expected)}",
                where=str(file.path),
                do="give the writer the parameters and the block width of the scanner that made the record",
            )
        if np.fmin.reduce(values, axis=None, initial=0) < 0 or np.fmax.reduce(values, axis=None, initial=0) == np.inf:
            names = ", ".join(sequence.name for sequence in rows.sequences)
            raise ContractError(
                f"{name} holds a value that is negative or infinite, which no norm is",
                where=f"{file.path}, sequences {names}",
                do="scan in a wider number format, such as model.dtype=float32",
            )
