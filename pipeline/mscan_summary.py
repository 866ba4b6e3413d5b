"""The contents of an .mscan file in a page of text."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tabulate import tabulate

from models.mscan.delta_sc import locate
from models.mscan.reader import Mscan
from models.mscan.version1 import MscanVersion1

COLUMNS = ("module", "weights", "blocks in", "blocks out", "activation", "gradient", "not measured", "error up to")


@dataclass
class Range:
    """Extremes of what is measured, and how much is not."""

    low: float = np.inf
    high: float = -np.inf
    values: int = 0
    unmeasured: int = 0

    def include(self, values: NDArray[np.float32]) -> None:
        """Widen the range by some more values."""
        self.low = float(np.fmin.reduce(values, axis=None, initial=self.low))
        self.high = float(np.fmax.reduce(values, axis=None, initial=self.high))
        self.values += values.size
        self.unmeasured += int(np.isnan(values).sum())

    def __str__(self) -> str:
        """As a reader wants it."""
        return f"{self.low:.3g} … {self.high:.3g}" if self.low <= self.high else "–"


def summarise(scan: Mscan, sequence: int | None = None) -> str:
    """The file, and value ranges per kind of module: of all sequences, or of one."""
    header = scan.header
    tokens = sum(one.tokens for one in scan.sequences)
    encoding = {"f32": "f32, lossless", "log16": "log16, 16 bits on each column's own logarithmic scale"}
    facts = [
        ("file", f"{scan.path} (.mscan version {scan.version}, {scan.end:,} bytes)"),
        ("model", header.model),
        ("created", header.created),
        ("parameters", f"{len(header.table.entries):,}, in blocks {header.table.block_width} wide"),
        ("sequences", f"{len(scan.sequences):,} of {tokens:,} tokens in {len(scan.segments)} segments"),
        ("encoding", encoding[header.encoding] + (", with values per token" if header.per_token else "")),
    ]
    facts += [(str(key), str(value)) for key, value in header.metadata.items()]
    if scan.torn:
        facts.append(("torn tail", f"{scan.torn:,} bytes that a killed writer had not sealed; not read"))
    if sequence is not None:
        one = scan.select(sequence).sequences[0]
        facts.append(("sequence", f"number {one.number}, {one.name}, {one.tokens:,} tokens {one.source}".rstrip()))
    table = tabulate(list(_module_rows(scan, sequence)), COLUMNS, tablefmt="simple", disable_numparse=True)
    return f"{tabulate(facts, tablefmt='plain', disable_numparse=True)}\n\n{table}\n"


def summarise_version1(scan: MscanVersion1) -> str:
    """A file of version 1, its codes as what they are."""
    tokens = sum(one.tokens for one in scan.sequences)
    facts = [
        ("file", f"{scan.path} (.mscan version 1)"),
        ("model", scan.model),
        ("created", scan.created),
        ("parameters", f"{len(scan.parameters):,}"),
        ("sequences", f"{len(scan.sequences):,} of {tokens:,} tokens"),
        ("records", f"{len(scan.records):,}, {scan.lost:,} more lost to the file's own header or a cut"),
        ("scale", "not stored: the values below are codes, not norms"),
    ]
    for name in ("activation", "grad_norm"):
        codes = scan.records[name]
        if len(codes):
            facts.append((name, f"codes {codes.min()} … {codes.max()}, {np.mean(codes == 0):.0%} of them 0"))
    return tabulate(facts, tablefmt="plain", disable_numparse=True) + "\n"


def _module_rows(scan: Mscan, sequence: int | None) -> Iterator[tuple[str, ...]]:
    table = scan.parameters
    modules: dict[str, list[int]] = {}
    for column, name in enumerate(table.names):
        modules.setdefault(locate(name)[1], []).append(column)
    ranges = {module: (Range(), Range()) for module in modules}
    for activation, gradient in _values(scan, sequence):
        for module, columns in modules.items():
            ranges[module][0].include(activation[:, columns])
            ranges[module][1].include(gradient[:, columns])
    bound = np.maximum(scan.error_bound("activation"), scan.error_bound("gradient"))
    for module, columns in modules.items():
        activation_range, gradient_range = ranges[module]
        inputs = sum(table.input_columns[c].stop - table.input_columns[c].start for c in columns)
        outputs = sum(table.output_columns[c].stop - table.output_columns[c].start for c in columns)
        missing = activation_range.unmeasured + gradient_range.unmeasured
        share = missing / max(1, activation_range.values + gradient_range.values)
        yield (
            module, f"{len(columns)}", f"{inputs:,}", f"{outputs:,}", str(activation_range), str(gradient_range),
            f"{share:.0%}" if share in {0, 1} else f"{share:.2%}", f"{bound[columns].max():.1e}",
        )  # fmt: skip


def _values(scan: Mscan, sequence: int | None) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Activation and gradient, a segment at a time."""
    if sequence is not None:
        arrays = scan.select(sequence).arrays
        yield arrays["activation"], arrays["gradient"]
        return
    for segment in scan.segments:
        yield segment.array("activation"), segment.array("gradient")
