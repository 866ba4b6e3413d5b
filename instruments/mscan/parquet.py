"""An .mscan file as one long Parquet table.

Columns: sequence (number), name, layer (null outside the layers), module, parameter, table (input, output or total),
block (null in total), activation (null in output), gradient; null where nothing was measured.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.parquet import ParquetWriter

from instruments.durable import whole_file
from instruments.errors import ContractError
from instruments.mscan.header import ParameterTable, Rows, locate
from instruments.mscan.reader import Mscan

ROWS_AT_ONCE = 1 << 20
TABLES = ("total", "input", "output")


def export_parquet(scan: Mscan, out: Path, sequence: int | None = None) -> int:
    """Write all sequences, or one, to `out`, which appears when it is complete; returns the number of rows.

    Raises:
        ContractError: `out` cannot be written.
    """
    columns = _Columns(scan.parameters)
    written = 0
    try:
        with whole_file(out) as unfinished, ParquetWriter(unfinished, columns.schema()) as writer:
            for rows in _parts(scan, sequence, max(1, ROWS_AT_ONCE // max(1, columns.count))):
                writer.write_table(columns.fill(rows))
                written += columns.count * len(rows.sequences)
    except OSError as error:
        raise ContractError(
            f"cannot write {out.name}: {error.strerror or error}", where=str(out), do="name another output file"
        ) from error
    return written


def _parts(scan: Mscan, sequence: int | None, most: int) -> Iterator[Rows]:
    if sequence is None:
        yield from scan.blocks_of_rows(most)
    else:
        yield scan.select(sequence)


class _Columns:
    """The columns that are the same for every sequence, P + I + O rows long, and how the others are filled in."""

    def __init__(self, table: ParameterTable) -> None:
        inputs, outputs = table.input_columns, table.output_columns
        self.parameters = table.names
        places = [locate(name) for name in table.names]
        self.modules = list(dict.fromkeys(module for _, module in places))
        self.parameter = np.concatenate([np.arange(len(places)), _owners(inputs), _owners(outputs)])
        self.module = np.array([self.modules.index(module) for _, module in places], np.int32)[self.parameter]
        self.layer = np.array([-1 if layer is None else layer for layer, _ in places], np.int32)[self.parameter]
        self.table = np.repeat(np.arange(3, dtype=np.int32), table.widths)
        self.block = np.concatenate([np.full(len(places), -1), _within(inputs), _within(outputs)]).astype(np.int32)
        self.count = len(self.table)

    def schema(self) -> pa.Schema:
        """Names and number formats."""
        text = pa.dictionary(pa.int32(), pa.string())
        return pa.schema(
            {
                "sequence": pa.int64(), "name": text, "layer": pa.int32(), "module": text, "parameter": text,
                "table": text, "block": pa.int32(), "activation": pa.float32(), "gradient": pa.float32(),
            }
        )  # fmt: skip

    def fill(self, rows: Rows) -> pa.Table:
        """The table of some sequences, one after the other."""
        arrays, count = rows.arrays, len(rows.sequences)
        unknown = np.full_like(arrays["out_gradient"], np.nan)
        activation = np.concatenate([arrays["activation"], arrays["in_activation"], unknown], axis=1).ravel()
        gradient = np.concatenate([arrays[n] for n in ("gradient", "in_gradient", "out_gradient")], axis=1).ravel()
        owner = np.repeat(np.arange(count, dtype=np.int32), self.count)
        numbers = np.array([sequence.number for sequence in rows.sequences], np.int64)
        columns: list[Any] = [
            pa.array(numbers[owner]),
            pa.DictionaryArray.from_arrays(owner, [sequence.name for sequence in rows.sequences]),
            _integers(np.tile(self.layer, count)),
            pa.DictionaryArray.from_arrays(np.tile(self.module, count), self.modules),
            pa.DictionaryArray.from_arrays(np.tile(self.parameter.astype(np.int32), count), self.parameters),
            pa.DictionaryArray.from_arrays(np.tile(self.table, count), TABLES),
            _integers(np.tile(self.block, count)),
            pa.array(activation, from_pandas=True),  # NaN is null
            pa.array(gradient, from_pandas=True),
        ]
        return pa.Table.from_arrays(columns, schema=self.schema())


def _integers(values: NDArray[np.int32]) -> pa.Array:
    """-1 is null."""
    return pa.array(values, mask=values < 0)


def _owners(columns: list[slice]) -> NDArray[np.int64]:
    """Which parameter each block belongs to."""
    return np.repeat(np.arange(len(columns)), [column.stop - column.start for column in columns])


def _within(columns: list[slice]) -> NDArray[np.int64]:
    """Number of each block within its parameter."""
    return np.concatenate([np.arange(column.stop - column.start) for column in columns] or [np.empty(0, np.int64)])
