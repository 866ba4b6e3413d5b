"""What each stage of a carve cost, from the run that computed it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from instruments.errors import ContractError
from pipeline.report.chain import Published
from pipeline.report.run_record import SHORT, RunRecord, StageRun, read_run_record


@dataclass(frozen=True)
class Cost:
    """One stage; `here` where this run computed it, no figures where no run on record did."""

    stage: str
    tokens: int | None  # calibration tokens it may read
    seconds: float | None
    peak_bytes: int | None
    here: bool


def costs_of(chain: Mapping[str, Published], run: RunRecord, output_dir: Path) -> list[Cost]:
    """The stages in the order of the chain; those that this run kept cost what they cost the run that made them."""
    costs = []
    missing = []
    for name, published in chain.items():
        stage_run = run.find(name)
        here = stage_run is not None and stage_run.seconds is not None and _matches(stage_run, published)
        costs.append(_cost(published, stage_run if here else None, here=here))
        if not here:
            missing.append(name)
    if not missing:
        return costs
    earlier = _find_earlier({name: chain[name] for name in missing}, output_dir)
    return [cost if cost.here else _cost(chain[cost.stage], earlier.get(cost.stage), here=False) for cost in costs]


def _cost(published: Published, run: StageRun | None, *, here: bool) -> Cost:
    tokens = published.settings.get("data", {}).get("tokens")
    seconds, peak = (run.seconds, run.peak_bytes) if run else (None, None)
    return Cost(published.stage, tokens, seconds, peak, here)


def _matches(run: StageRun, published: Published) -> bool:
    return run.fingerprint[:SHORT] == published.manifest.fingerprint[:SHORT]


def _find_earlier(wanted: Mapping[str, Published], output_dir: Path) -> dict[str, StageRun]:
    """The last run on record of each of these results."""
    found: dict[str, StageRun] = {}
    for record in _run_records(output_dir):
        for stage in record.stages:
            published = wanted.get(stage.stage)
            known = stage.stage in found or stage.seconds is None
            if published is not None and not known and _matches(stage, published):
                found[stage.stage] = stage
        if len(found) == len(wanted):
            break
    return found


def _run_records(output_dir: Path) -> Iterator[RunRecord]:
    """All records, the last run first."""
    folders = [
        path.parent for pattern in ("runs/*/report.md", "sweeps/*/*/report.md") for path in output_dir.glob(pattern)
    ]
    for folder in sorted(folders, key=lambda folder: folder.name, reverse=True):
        try:
            yield read_run_record(folder)
        except ContractError:
            continue
