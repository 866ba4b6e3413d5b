"""The scan's parameter-level record: norms of every Linear weight's input and gradient, in an .mscan file."""

import json
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

from torch import nn

from instruments.errors import ConfigError, ContractError, NumericsError
from instruments.mscan.reader import read_mscan
from instruments.mscan.writer import MscanWriter, merge_mscan
from instruments.parameter_scan.scanner import ParameterTensorScanner
from instruments.parameter_scan.targets import ScanRecord
from stages.artifacts.job import Workers
from stages.scan.config import ScanConfig

FILE = "parameters.mscan"

logger = logging.getLogger(__name__)


@dataclass
class ParameterRecorder:
    """One worker's records, in a lossless part of the file to come. `record_parameters` closes both."""

    scanner: ParameterTensorScanner
    writer: MscanWriter
    source: str
    records: list[ScanRecord] = field(default_factory=list)  # of the last pass

    def expect(self, names: Sequence[str]) -> None:
        """Name the samples of the pass to come."""
        self.scanner.name_samples(names, self.source)

    def take(self, *, last: bool) -> bool:
        """Take over the pass just made; whether its numbers can be used. Raises NumericsError at the `last` try."""
        try:
            self.records = self.scanner.collect()
        except NumericsError:
            if last:
                raise
            return False
        return True

    def keep(self, first: int, loss_scale: float) -> None:
        """Write the pass taken over; its samples are number `first` and following of the scan."""
        for record in self.records:
            self.writer.add(_unscale(record, loss_scale), range(first, first + len(record.sequences)))


@dataclass(frozen=True)
class PartsPlace:
    """Where the workers of a scan keep their parts, apart from those of a scan of other code, text or precision."""

    scratch: Path
    identity: Mapping[str, str]  # what must be the same for records to stand in one file

    def part(self, worker: int | str) -> Path:
        """File of one worker; `*` gives the pattern of all."""
        digest = sha256(json.dumps(dict(self.identity), sort_keys=True).encode()).hexdigest()[:12]
        return self.scratch / f"{FILE}.{digest}.{worker}.part"

    def parts(self) -> list[Path]:
        """Files of all workers, those of earlier runs included."""
        return sorted(self.scratch.glob(self.part("*").name))


@contextmanager
def record_parameters(
    model: nn.Module, scan: ScanConfig, place: PartsPlace, workers: Workers, *, source: str, label: str, fresh: bool
) -> Iterator[ParameterRecorder | None]:
    """Watch the model and go on with this worker's part of the file; None where no record is asked for.

    Raises:
        ConfigError: no weight matches the patterns, or the workers have no folder in common.
        ContractError: the part of an earlier run is damaged or has other parameters.
    """
    if not scan.parameters:
        yield None
        return
    require_common_folder(place.scratch, workers)
    path = place.part(workers.rank)
    if fresh:  # of several machines only the leading worker's is cleaned before
        path.unlink(missing_ok=True)
    try:
        scanner = ParameterTensorScanner(
            model,
            scan.parameter_patterns,
            block_width=scan.block_width,
            per_token=scan.per_token,
            gradients=scan.gradients,
            product=scan.norm_product,
        )
    except ConfigError as error:  # which speaks of the scanner's own arguments
        what, do = (text.replace("patterns=[", "scan.parameter_patterns=[") for text in (error.what, error.do))
        raise ConfigError(what, where="setting scan.parameter_patterns", do=do) from error
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        writer = MscanWriter(
            path,
            scanner.parameters,
            model=label,
            block_width=scan.block_width,
            encoding="f32",
            per_token=scan.per_token,
            append=True,
        )
    for warning in caught:
        logger.warning("%s", warning.message)
    with writer, scanner:
        yield ParameterRecorder(scanner, writer, source)


def require_common_folder(scratch: Path, workers: Workers) -> None:
    """Refuse workers on machines without a common folder, before they scan: their parts could not be joined.

    Raises ConfigError at every worker.
    """
    token = scratch / f"{FILE}.common.{workers.follow(uuid4().hex)}"
    if workers.leads:
        token.touch()
    workers.follow(None)
    blind = [rank for rank, sees in enumerate(workers.share(token.exists())) if not sees]
    if workers.leads:
        token.unlink()
    if blind:
        raise ConfigError(
            f"scan.parameters=true joins the files of all workers, and worker {', '.join(map(str, blind))} has another "
            "output folder than worker 0",
            where=f"setting output_dir, {scratch}",
            do="output_dir= on a disk that all machines share, or scan=default",
        )


def require_recorded(place: PartsPlace, samples: Collection[int]) -> None:
    """Refuse to go on from sums whose records are not here, before the rest is scanned. Raises ContractError."""
    files = (read_mscan(path, verify=False) for path in place.parts())
    recorded = {sequence.number for file in files for sequence in file.sequences}
    if missing := set(samples) - recorded:
        raise ContractError(
            f"the sums hold {len(missing)} of {len(samples)} samples whose parameter-level record is on the machine "
            "that scanned them",
            where=f"{place.scratch}; a store that several machines share keeps sums only",
            do="a store.namespace of its own for this scan; fresh=true, which scans again; or scan=default",
        )


def publish_parameters(place: PartsPlace, out: Path, samples: int, encoding: str) -> None:
    """All workers' parts, and those of earlier runs, as `out/parameters.mscan`.

    The same bytes but for the date, however often the scan was interrupted and however many workers it had. Raises
    ContractError: a sample is in no part.
    """
    require_recorded(place, range(samples))
    created = min(read_mscan(path, verify=False).header.created for path in place.parts())  # when the scan began
    merge_mscan(place.parts(), out / FILE, created=created, numbers=range(samples), encoding=encoding)


def _unscale(record: ScanRecord, loss_scale: float) -> ScanRecord:
    if loss_scale == 1:
        return record
    tokens = record.token_gradient
    return replace(
        record,
        gradient_BP=record.gradient_BP / loss_scale,
        in_gradient_BI=record.in_gradient_BI / loss_scale,
        out_gradient_BO=record.out_gradient_BO / loss_scale,
        token_gradient=None if tokens is None else [gradient / loss_scale for gradient in tokens],
    )
