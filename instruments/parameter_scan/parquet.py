"""Export an .mscan file as one long Parquet table.

Columns: sequence (number), name, layer (null outside the layers), module, parameter, table (input, output, total or,
with values per token, token), block (null in total and token), token (position among the sequence's tokens; null
elsewhere), activation (null in output), gradient. Values that were not measured are null.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow.parquet import ParquetWriter

from instruments.files import whole_file
from instruments.parameter_scan.file_format import Rows, refused
from instruments.parameter_scan.parameters import ParameterTable, locate
from instruments.parameter_scan.reader import Mscan

ROWS_AT_ONCE = 1 << 20
_TEXT = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    {
        "sequence": pa.int64(), "name": _TEXT, "layer": pa.int32(), "module": _TEXT, "parameter": _TEXT,
        "table": _TEXT, "block": pa.int32(), "token": pa.int32(), "activation": pa.float32(), "gradient": pa.float32(),
    }
)  # fmt: skip


def export_parquet(scan: Mscan, out: Path, only: Rows | None = None) -> int:
    """Write all sequences, or one, and return the number of rows. Raises ContractError: `out` cannot be written."""
    fixed, written = _fixed_columns(scan.parameters), 0
    most = max(1, ROWS_AT_ONCE // max(1, sum(scan.parameters.widths)))
    try:
        with whole_file(out) as unfinished, ParquetWriter(unfinished, SCHEMA) as writer:
            for rows in scan.blocks_of_rows(most) if only is None else [only]:
                tables = [_table(fixed, rows)]
                if scan.header.per_token:
                    tables += (_token_table(fixed, one) for one in rows.split())
                for table in tables:
                    writer.write_table(table)
                    written += len(table)
    except OSError as error:
        what = f"cannot write {out.name}: {error.strerror or error}"
        raise refused(out, what, "name another output file") from error
    return written


def _fixed_columns(table: ParameterTable) -> dict[str, pa.Array]:
    """The columns that are equal for every sequence, each P + I + O long."""
    blocks = [[entry.in_blocks for entry in table.entries], [entry.out_blocks for entry in table.entries]]
    places = [locate(name) for name in table.names]
    everyone = np.arange(len(places), dtype=np.int32)
    parameter = pa.array(np.concatenate([everyone, *(np.repeat(everyone, counts) for counts in blocks)]))
    within = [np.arange(count, dtype=np.int32) for counts in blocks for count in counts]
    block = np.concatenate([np.full_like(everyone, -1), *within])
    tables = np.repeat(np.arange(3, dtype=np.int32), table.widths)
    return {
        "layer": pa.array([layer for layer, _ in places], pa.int32()).take(parameter),
        "module": pa.array([module for _, module in places], _TEXT).take(parameter),
        "parameter": pa.array(table.names, _TEXT).take(parameter),
        "table": pa.DictionaryArray.from_arrays(tables, ["total", "input", "output"]),
        "block": pa.array(block, mask=block < 0),
    }


def _table(fixed: dict[str, pa.Array], rows: Rows) -> pa.Table:
    """The concatenated table of some sequences."""
    arrays, count = rows.arrays, len(rows.sequences)
    unknown = np.full_like(arrays["out_gradient"], np.nan)
    norms = {
        "activation": [arrays["activation"], arrays["in_activation"], unknown],
        "gradient": [arrays["gradient"], arrays["in_gradient"], arrays["out_gradient"]],
    }
    owner = np.repeat(np.arange(count, dtype=np.int32), len(fixed["layer"]))
    numbers = np.array([sequence.number for sequence in rows.sequences], np.int64)
    columns = {
        "sequence": pa.array(numbers[owner]),
        "name": pa.DictionaryArray.from_arrays(owner, [sequence.name for sequence in rows.sequences]),
        **{name: pa.chunked_array([column] * count, column.type) for name, column in fixed.items()},
        "token": pa.nulls(len(owner), pa.int32()),
        # NaN is null
        **{name: pa.array(np.concatenate(parts, axis=1).ravel(), from_pandas=True) for name, parts in norms.items()},
    }
    return pa.table(columns, schema=SCHEMA)


def _token_table(fixed: dict[str, pa.Array], rows: Rows) -> pa.Table:
    """The table of one sequence's tokens: all parameters of the first token, then of the second ..."""
    (sequence,), arrays = rows.sequences, rows.arrays
    parameters = arrays["token_activation"].shape[1]
    size = sequence.tokens * parameters
    of_parameters = {name: fixed[name].slice(0, parameters) for name in ("layer", "module", "parameter")}
    zeros = np.zeros(size, np.int32)
    columns = {
        "sequence": pa.array(np.full(size, sequence.number, np.int64)),
        "name": pa.DictionaryArray.from_arrays(zeros, [sequence.name]),
        **{name: pa.chunked_array([column] * sequence.tokens, column.type) for name, column in of_parameters.items()},
        "table": pa.DictionaryArray.from_arrays(zeros, ["token"]),
        "block": pa.nulls(size, pa.int32()),
        "token": pa.array(np.repeat(np.arange(sequence.tokens, dtype=np.int32), parameters)),
        "activation": pa.array(arrays["token_activation"].ravel(), from_pandas=True),
        "gradient": pa.array(arrays["token_gradient"].ravel(), from_pandas=True),
    }
    return pa.table(columns, schema=SCHEMA)
