"""From the folder of a run to what its page is made from."""

from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from models.errors import ConfigError, ContractError
from pipeline.artifact import is_complete
from pipeline.layout import artifact_folder
from pipeline.report.page import Source
from pipeline.report.run_record import StageRun, read_run_record

CONFIG = "config.yaml"


def find_source(folder: Path) -> Source:
    """What the page of a run needs.

    Raises:
        ConfigError: the run evaluated nothing.
        ContractError: its record cannot be read, or its evaluation is gone.
    """
    folder = folder.resolve()
    run = read_run_record(folder)
    label, output_dir, config = _read_config(folder)
    stage = run.find("evaluate")
    if stage is None:
        raise ConfigError(
            "this run evaluated nothing, and the report is of an evaluation",
            where=str(folder),
            do="python -m pipeline with the run's settings and stage=evaluate",
        )
    output_dir, evaluation = _find_evaluation(folder, output_dir, label, stage)
    return Source(label, run, config, evaluation, output_dir)


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


def _find_evaluation(folder: Path, output_dir: Path, label: str, stage: StageRun) -> tuple[Path, Path]:
    """Output folder and published folder: as the settings have it, or around the place where the run lies now."""
    for place in (output_dir, *folder.parents):
        found = artifact_folder(place, label, "evaluate", stage.fingerprint)
        if is_complete(found):
            return place, found
    raise ContractError(
        f"the evaluation {stage.fingerprint[:16]} of this run was removed",
        where=str(artifact_folder(output_dir, label, "evaluate", stage.fingerprint)),
        do="run the command at the head of its report.md again",
    )
