"""The contents of a tensor dump in a page of text, from its index alone."""

import re
from collections.abc import Iterable, Iterator, Sequence
from math import prod

from tabulate import tabulate

from models.dump.listing import Listing
from models.dump.records import STORED, TensorRecord

COLUMNS = ("module", "tensor", "records", "shape", "type", "range", "largest std", "rounding", "suspicious")
_COMPLAINTS = {
    "never_fired": "modules never fired",
    "missing": "modules lack a tensor that was asked for",
    "zero_gradients": "gradients are zero everywhere",
    "nonfinite": "tensors hold values that are not finite",
    "dropped": "tensors were dropped, the memory being full",
    "lost": "tensors were lost to a disk that failed",
}
_SHOWN = 3


def summarise(listing: Listing, chosen: Sequence[TensorRecord]) -> str:
    """Facts, a row for each kind of module and tensor, and what must not be overlooked."""
    groups: dict[tuple[str, str], list[TensorRecord]] = {}
    for record in chosen:
        kind = re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)|(?<=\.)\d+$", "*", record.source.module)
        groups.setdefault((kind, record.source.tensor), []).append(record)
    rows = [_row(kind, tensor, records) for (kind, tensor), records in groups.items()]
    table = tabulate(rows, COLUMNS, disable_numparse=True)
    facts = tabulate(list(_facts(listing, chosen)), tablefmt="plain", disable_numparse=True)
    complaints = "".join(f"{line}\n" for line in complaints_of(listing))
    return f"{facts}\n\n{table}\n" + (f"\n{complaints}" if complaints else "")


def complaints_of(listing: Listing) -> Iterator[str]:
    """Missing files, torn ends, killed processes, and what the manifests say."""
    if missing := listing.missing_files:
        yield f"{len(missing)} files that the index names are missing: {_some(missing)}"
    if listing.torn:
        yield f"{listing.torn} bytes at the end of an index were left by a killed process, and are not read"
    manifests = listing.manifests()
    killed = [rank for index in listing.indices if (rank := int(index.header["rank"])) not in manifests]
    if killed:
        yield f"ranks {_some(map(str, killed))} did not end their dump: what is listed is whole, more was to come"
    for rank, manifest in sorted(manifests.items()):
        for field, words in _COMPLAINTS.items():
            if found := manifest[field]:
                count, names = (found, "") if isinstance(found, int) else (len(found), f": {_some(found)}")
                yield f"rank {rank}: {count} {words}{names}"


def _facts(listing: Listing, chosen: Sequence[TensorRecord]) -> Iterator[tuple[str, str]]:
    sources = [record.source for record in chosen]
    steps = sorted({source.step for source in sources})
    stored = {(record.file, record.key): record for record in chosen if record.status == STORED}
    size = sum(prod(record.shape) * _BYTES.get(record.dtype, 4) for record in stored.values())
    labels = {record.label for record in chosen if record.label is not None}
    yield "folder", str(listing.folder)
    yield (
        "records",
        f"{len(chosen):,} of {len(listing.records):,}, {len({source.module for source in sources})} modules",
    )
    yield "processes", ", ".join(str(index.header["rank"]) for index in listing.indices)
    yield "steps", f"{len(steps)}, {steps[0]} to {steps[-1]}"
    yield "tensors", f"{len(stored):,} of {size / 2**20:,.1f} MiB, those that layers share once"
    if labels:
        real = sorted({record.quant_type for record in chosen})
        yield "label", f"{', '.join(sorted(labels))}; really {', '.join(real)}"


_BYTES = {"float64": 8, "int64": 8, "bfloat16": 2, "float16": 2, "uint8": 1, "int8": 1, "float8_e4m3fn": 1}


def _row(kind: str, tensor: str, records: Sequence[TensorRecord]) -> tuple[str, ...]:
    found = [record.statistics for record in records if record.statistics is not None]
    lows = [one.minimum for one in found if one.minimum is not None]
    highs = [one.maximum for one in found if one.maximum is not None]
    deviations = [one.std for one in found if one.std is not None]
    errors = [record.rounding.relative_l2 for record in records if record.rounding is not None]
    zeros, nonfinite = sum(one.all_zero for one in found), sum(one.nonfinite > 0 for one in found)
    notes = [f"{zeros} all zero"] * (zeros > 0) + [f"{nonfinite} not finite"] * (nonfinite > 0)
    notes += [f"{len(records) - len(found)} dropped"] * (len(found) < len(records))
    shapes = sorted({"×".join(map(str, record.shape)) for record in records})
    return (
        kind, tensor, f"{len(records):,}", _some(shapes, " "), _some(sorted({record.quant_type for record in records})),
        f"{min(lows):.3g} … {max(highs):.3g}" if lows else "–", f"{max(deviations):.3g}" if deviations else "–",
        f"{max(errors):.2g}" if errors else "", ", ".join(notes),
    )  # fmt: skip


def _some(names: Iterable[str], separator: str = "; ") -> str:
    names = list(names)
    more = f"{separator}and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return separator.join(names[:_SHOWN]) + more
