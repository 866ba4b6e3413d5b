"""Parameter-level record of a scan: norms of every Linear weight's input and gradient, in an .mscan file."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from torch import nn

from instruments.errors import ConfigError, ContractError, NumericsError
from instruments.parameter_scan.reader import read_mscan
from instruments.parameter_scan.scanner import ParameterTensorScanner
from instruments.parameter_scan.targets import ScanRecord
from instruments.parameter_scan.writer import MscanWriter, merge_mscan
from stages.accumulators.config import START_OVER
from stages.artifacts.job import Workers
from stages.scan.config import ScanConfig

FILE = "parameters.mscan"


@dataclass
class ParameterRecorder:
    """Writes one worker's records to its lossless part file. `record_parameters` closes scanner and writer."""

    scanner: ParameterTensorScanner
    writer: MscanWriter
    source: str
    records: list[ScanRecord] = field(default_factory=list)  # of the last pass, not yet written

    def take(self, *, last: bool) -> bool:
        """Collect the records of the pass; False if they are not finite, NumericsError if this was the `last` try."""
        try:
            self.records = self.scanner.collect()
        except NumericsError:
            if last:
                raise
            return False
        return True

    def keep(self, first: int, loss_scale: float) -> None:
        """Write the collected records; the scan numbers their samples from `first`."""
        for record in self.records:
            self.writer.add(_unscale(record, loss_scale), range(first, first + len(record.sequences)))


@dataclass(frozen=True)
class PartsPlace:
    """The part files of a scan's workers. Scans of another identity (code, text, precision) have other names."""

    scratch: Path
    identity: Mapping[str, str]  # only records of the same identity may be merged

    def part(self, worker: int | str) -> Path:
        """File of one worker; `*` gives the pattern for all workers."""
        digest = sha256(json.dumps(dict(self.identity), sort_keys=True).encode()).hexdigest()[:12]
        return self.scratch / f"{FILE}.{digest}.{worker}.part"

    def parts(self) -> list[Path]:
        """Files of all workers, those of earlier runs included."""
        return sorted(self.scratch.glob(self.part("*").name))


@contextmanager
def _readable_parts() -> Iterator[None]:
    """Every resume reads the same parts, so that only a scan from the start replaces one that cannot be used."""
    try:
        yield
    except ContractError as error:
        raise ContractError(error.what, where=error.where, do=START_OVER) from error


@contextmanager
def record_parameters(
    model: nn.Module, scan: ScanConfig, place: PartsPlace, workers: Workers, *, source: str, label: str, fresh: bool
) -> Iterator[ParameterRecorder | None]:
    """Watch the model and append to this worker's part file; yields None if `scan.parameters` is false.

    Raises:
        ConfigError: no weight matches the patterns, or a worker writes its part to another disk.
        ContractError: the part of an earlier run is damaged or has other parameters.
    """
    if not scan.parameters:
        yield None
        return
    path = place.part(workers.rank)
    if fresh:  # the pipeline has cleaned the scratch folder of the leading worker's machine only
        path.unlink(missing_ok=True)
    try:
        scanner = ParameterTensorScanner(
            model, scan.parameter_patterns, block_width=scan.block_width, gradients=scan.gradients
        )
    except ConfigError as error:  # its message names the scanner's arguments, not the settings
        what, do = (text.replace("patterns=[", "scan.parameter_patterns=[") for text in (error.what, error.do))
        raise ConfigError(what, where="setting scan.parameter_patterns", do=do) from error
    with _readable_parts():
        writer = MscanWriter(
            path, scanner.parameters, model=label, block_width=scan.block_width, encoding="f32", append=True
        )  # fmt: skip
    with writer, scanner:
        if lost := [str(part) for part in workers.gather(path) if not part.exists()]:
            what = "the leading worker joins the workers' parts of parameters.mscan, and some are on another disk"
            do = "output_dir= on a disk that all workers share, or scan.parameters=false"
            raise ConfigError(what, where=", ".join(lost), do=do)
        yield ParameterRecorder(scanner, writer, source)


def publish_parameters(place: PartsPlace, out: Path, samples: int) -> None:
    """Merge the part files of all workers and earlier runs into `out/parameters.mscan`.

    Apart from the date, the bytes do not depend on interruptions or on the number of workers. Raises ContractError if
    a sample has no record.
    """
    parts = place.parts()
    # When the scan began.
    with _readable_parts():
        created = min((read_mscan(path, verify=False).header.created for path in parts), default="")
        merge_mscan(parts, out / FILE, created=created, numbers=range(samples))


def _unscale(record: ScanRecord, loss_scale: float) -> ScanRecord:
    if loss_scale == 1:
        return record
    return replace(
        record,
        gradient_BP=record.gradient_BP / loss_scale,
        in_gradient_BI=record.in_gradient_BI / loss_scale,
        out_gradient_BO=record.out_gradient_BO / loss_scale,
    )
