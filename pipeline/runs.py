"""`python -m pipeline runs`: runs with their figures, and removal of runs with the results that only they use."""

import argparse
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from textwrap import shorten

from instruments.errors import ConfigError, ContractError, exit_code, say, some
from instruments.files import check_fields, kinds_of
from pipeline.artifacts import SHORT, UNREADABLE, Manifest, StagingDir, hold_lock, is_complete, output_in_use
from pipeline.help import find_workspace
from pipeline.run_folder import RECORD, RunRecord
from pipeline.settings import STAGES
from stages.artifacts.job import Table
from stages.artifacts.rendering import in_mib, render

FIGURES = ("loss gap (nats)", "perplexity", "active parameters", "tokens/s")  # columns of evaluate's table
# A result by its place below artifacts/: <model>/<stage>/<start of the fingerprint>.
RESULT = re.compile(rf"(?!\.)[^/]+/({'|'.join(STAGES)})/[0-9a-f]{{{SHORT}}}")


@dataclass(frozen=True)
class Run:
    """One run; `folder` may be a link to a run whose folder is outside the output folder."""

    name: str  # path of the folder below the output folder
    folder: Path
    words: Sequence[str] = ()
    results: Sequence[str] = ()  # of all planned stages
    finished: Sequence[str] = ()  # stages
    fault: str = ""  # why its record cannot be read, so that its results are unknown

    def is_named(self, name: str) -> bool:
        """Whether the name is this run's, or that of its sweep."""
        return self.name == name or ("/" in name and self.name.startswith(f"{name}/"))


def main(words: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 a run is active or a record is damaged, 2 no such run."""
    about = "List the runs with their figures, or remove some of them."
    parser = argparse.ArgumentParser(prog="python -m pipeline runs", description=about)
    parser.add_argument("--output-dir", type=Path, default=find_workspace() / "outputs", metavar="FOLDER")
    about = "delete runs, with the results that no other run uses"
    remove = parser.add_subparsers().add_parser("remove", help=about, description=about)
    remove.add_argument("names", nargs="+", metavar="NAME", help="as listed; sweeps/NAME: all its jobs")
    wanted = parser.parse_args(words)

    def work() -> None:
        folder = wanted.output_dir.absolute()
        if not folder.is_dir():
            raise ConfigError(
                f"there is no folder {folder}", where="--output-dir", do="name the output_dir of your runs"
            )
        removed = remove_runs(folder, wanted.names) if "names" in wanted else None
        say(f"{removed or render(compare(folder, find_runs(folder)), 'simple')}\n")

    return exit_code(work)


def find_runs(folder: Path) -> list[Run]:
    """The runs of an output folder or a sweep, the oldest first, by their paths below it."""
    names = {path.relative_to(folder).parent: path for path in _find_records(folder)}
    runs = sorted(names, key=lambda name: [part.zfill(4) for part in name.parts])
    return [read_run(str(name), names[name]) for name in runs]


def _find_records(folder: Path, depth: int = 0) -> Iterator[Path]:
    """Records of runs below the folder; a run's folder may be a link, and so may those of the first two levels."""
    with suppress(FileNotFoundError, PermissionError):  # a folder may vanish meanwhile
        for entry in [*os.scandir(folder)]:
            if not entry.is_dir() or (depth == 0 and entry.name in {"artifacts", "latest"}):
                continue
            path = folder / entry.name
            if (path / RECORD).is_file():
                yield path / RECORD
            if depth < 2 or not entry.is_symlink():
                yield from _find_records(path, depth + 1)


def read_run(name: str, path: Path) -> Run:
    """Read a run's record, which may be damaged."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        check_fields(record, kinds_of(RunRecord))
        if wrong := [result for result in record["results"] if not RESULT.fullmatch(result)]:
            raise ValueError(f"{wrong[0]} is no result")
    except UNREADABLE as error:
        return Run(name, path.parent, fault=str(error))
    finished = [stage["stage"] for stage in record["stages"]]
    words = [word for word in record["overrides"] if not word.startswith("output_dir=")]
    return Run(name, path.parent, words, record["results"], finished)


def find_results(artifacts: Path, runs: Iterable[Run], *, strict: bool) -> set[str]:
    """All results of runs and those from which they were computed; `strict`: raises ContractError, a bad manifest."""
    found: set[str] = set()
    waiting = [result for run in runs for result in run.results]
    while waiting:
        if (result := waiting.pop()) in found:
            continue
        found.add(result)
        if is_complete(folder := artifacts / result):
            try:
                parents = Manifest.read(folder, remedy=f"delete the folder {folder}").recipe["parents"]
            except ContractError:
                if strict:
                    raise
                continue
            label = result.partition("/")[0]
            waiting += filter(RESULT.fullmatch, (f"{label}/{name}/{mark[:SHORT]}" for name, mark in parents.items()))
    return found


def remove_runs(output_dir: Path, names: Sequence[str]) -> str:
    """Delete runs, and the results that no other run uses; says what was deleted.

    After a kill, the same command goes on. Links are deleted, not what they point to.

    Raises:
        ConfigError: there is no such run; LockedError: a run is active; ContractError: the record of another run or a
            manifest is damaged, so that what it uses is unknown, or a link leads out of artifacts/ or of the runs.
    """
    artifacts = output_dir / "artifacts"
    command = f"python -m pipeline runs --output-dir {shlex.quote(str(output_dir))}"
    with output_in_use(output_dir, alone=True):
        runs, names = find_runs(output_dir), [name.rstrip("/") for name in names]
        if unknown := [name for name in names if not any(run.is_named(name) for run in runs)]:
            raise ConfigError(f"there is no run {some(unknown)}", where=str(output_dir), do=command)
        gone = [run for run in runs if any(map(run.is_named, names))]
        kept = [run for run in runs if run not in gone]
        if damaged := [run for run in kept if run.fault]:
            what = f"records of other runs are damaged, so that their results are unknown: {damaged[0].fault}"
            do = f"{command} remove {shlex.join(run.name for run in damaged)}"
            raise ContractError(what, where=some(str(run.folder / RECORD) for run in damaged), do=do)
        if inside := [run.name for run in kept if any(one.folder in run.folder.parents for one in gone)]:
            what = f"below it are runs that would be deleted, too: {some(inside)}"
            do = f"{command} remove {shlex.join([*names, *inside])}, or move them"
            raise ConfigError(what, where=some(str(run.folder) for run in gone), do=do)
        homes = [(output_dir / home).resolve() for home in ("", "runs", "sweeps")]  # each may be a link itself
        away = [one for one in gone if not any(one.folder.parent.resolve().is_relative_to(home) for home in homes)]
        if links := some(str(run.folder) for run in away):
            raise ContractError("runs are behind a link that leads out of it", where=links, do="remove that link")
        used = {(artifacts / result).resolve() for result in find_results(artifacts, kept, strict=True)}
        own = [one for one in find_results(artifacts, gone, strict=False) if (artifacts / one).resolve() not in used]
        # Ancestors first: after a kill, the manifests that name them are still there.
        folders = [artifacts / result for stage in STAGES for result in sorted(own) if f"/{stage}/" in result]
        outside = (folder for folder in folders if not folder.parent.resolve().is_relative_to(artifacts.resolve()))
        if links := some(map(str, outside)):
            raise ContractError("results are behind a link that leads out of it", where=links, do="remove that link")
        freed = sum(map(remove_result, folders))
        for run in gone:
            _delete(run.folder)
        if not (latest := output_dir / "latest").exists():
            latest.unlink(missing_ok=True)
    return f"removed {some(run.name for run in gone)}, with {in_mib(freed)} of results that no other run uses"


def remove_result(folder: Path) -> int:
    """Delete a result and unfinished work on it; returns the result's bytes. Raises LockedError: a run computes it."""
    if not folder.parent.is_dir():
        return 0
    staging, removed = StagingDir(folder), folder.with_name(f".{folder.name}.removed")
    with hold_lock(staging.lock):
        _delete(removed)
        size = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
        if folder.is_symlink() or folder.exists():
            folder.rename(removed)  # as a whole: what a kill leaves is no result
        _delete(removed)
        _delete(staging.root)
    return size


def _delete(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        rmtree(path)


def compare(output_dir: Path, runs: Sequence[Run]) -> Table:
    """A row for each run with the figures of its MoE, and the settings that not all of them have in common."""
    read = [set(run.words) for run in runs if not run.fault]
    common = set.intersection(*read) if len(read) > 1 else set()
    rows = []
    for run in runs:
        last = run.finished[-1] if run.finished else "none"
        state = last + " (unfinished)" * (len(run.finished) < len(run.results))
        settings = shorten(" ".join(word for word in run.words if word not in common), 100, placeholder=" …")
        figures = _figures(output_dir / "artifacts", run)
        rows.append([run.name, "damaged record" if run.fault else state, *figures, settings])
    return Table(f"{len(runs)} runs in {output_dir}", ["run", "last stage", *FIGURES, "settings"], rows)


def _figures(artifacts: Path, run: Run) -> list[object]:
    """Figures of the run's evaluation, None for those that it lacks."""
    row: dict[str, object] = {}
    for result in run.results:
        with suppress(ContractError, StopIteration):  # no result, or a damaged one
            table = Manifest.read(artifacts / result, remedy="").table
            if table.title == "evaluate" and "evaluate" in run.finished:
                row = dict(zip(table.columns, next(row for row in table.rows if row[0] == "this MoE"), strict=True))
    return [row.get(name) or None for name in FIGURES]
