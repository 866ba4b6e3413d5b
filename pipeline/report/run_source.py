"""From the folder of a run to what its page is made from."""

from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from instruments.errors import ConfigError, ContractError
from pipeline.artifacts import is_complete
from pipeline.command import command_line
from pipeline.layout import artifact_folder
from pipeline.report.page import Source
from pipeline.report.run_record import FILE, StageRun, read_run_record
from pipeline.report.settings import without_secrets

CONFIG = "config.yaml"


def find_source(folder: Path) -> Source:
    """What the page of a run needs.

    Raises:
        ConfigError: no stage of the run was finished.
        ContractError: its record cannot be read, or the result of its last stage is gone.
    """
    folder = folder.resolve()
    run = read_run_record(folder)
    label, output_dir, config = _read_config(folder)
    if not run.stages:
        command = without_secrets(command_line(list(run.overrides)))
        raise ConfigError("no stage of this run was finished", where=str(folder), do=command)
    output_dir, last = _find_result(folder, output_dir, label, run.stages[-1])
    return Source(label, run, config, last, output_dir)


def find_latest(output_dir: Path) -> Path | None:
    """The folder of the run that finished a stage last; None where no run has."""
    records = [path for pattern in ("runs", "sweeps/*") for path in output_dir.glob(f"{pattern}/*/{FILE}")]
    for path in sorted(records, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        if read_run_record(path.parent).stages:
            return path.parent
    return None


def _read_config(folder: Path) -> tuple[str, Path, str]:
    """Label of the model, output folder and the settings as they stand."""
    path = folder / CONFIG
    try:
        config = OmegaConf.load(path)
        return str(config.model.label), Path(str(config.output_dir)), path.read_text(encoding="utf-8")
    except (OSError, YAMLError, OmegaConfBaseException, AttributeError) as error:
        raise ContractError(
            f"cannot read the settings of the run: {error}", where=str(path), do="name a folder under outputs/runs"
        ) from error


def _find_result(folder: Path, output_dir: Path, label: str, stage: StageRun) -> tuple[Path, Path]:
    """Output folder and published folder: as the settings have it, or around the place where the run lies now."""
    for place in (output_dir, *folder.parents):
        found = artifact_folder(place, label, stage.stage, stage.fingerprint)
        if is_complete(found):
            return place, found
    raise ContractError(
        f"the result {stage.fingerprint[:16]} of this run's {stage.stage} was removed",
        where=str(artifact_folder(output_dir, label, stage.stage, stage.fingerprint)),
        do="run the command at the head of its report.md again",
    )
