"""The page of a run: one file without scripts that asks nothing of any network."""

import time
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from instruments.errors import ConfigError, ContractError
from pipeline.artifacts import is_complete
from pipeline.command import command_line
from pipeline.layout import artifact_folder
from pipeline.report import sections
from pipeline.report.charts import COLOURS
from pipeline.report.evaluations import read_chain, read_evaluation, read_published
from pipeline.report.run_record import RunRecord, StageRun, read_run_record
from pipeline.report.words import key_figures, plain, shape_words, verdict, without_secrets

FILE = "report.html"


@dataclass(frozen=True)
class Source:
    """What a page is made from."""

    label: str
    run: RunRecord
    config: str  # the run's settings as YAML
    last: Path  # published folder of the run's last stage
    output_dir: Path


def write_page(source: Source, out: Path) -> Path:
    """Write the page of a run.

    Raises:
        ContractError: the last stage's result cannot be read.
        OSError: the page cannot be written.
    """
    page = draw_page(source)
    new = out.with_name(f".{out.name}.new")
    new.write_text(page, encoding="utf-8")
    new.replace(out)
    return out


def draw_page(source: Source) -> str:
    """The page; text from anywhere is escaped. Raises ContractError: the last stage's result cannot be read."""
    last = read_published(source.last)
    chain = read_chain(last)
    evaluation = read_evaluation(source.last) if last.stage == "evaluate" else None
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["plain"] = plain
    return environment.get_template("page.html.j2").render(
        colours=COLOURS,
        label=source.label,
        heading=shape_words(evaluation.shape) if evaluation else last.stage,
        verdict=verdict(evaluation) if evaluation else None,
        tiles=key_figures(evaluation) if evaluation else [],
        found=None if evaluation else sections.found(last),
        quality=sections.quality(evaluation) if evaluation else None,
        widths=sections.widths(evaluation) if evaluation else None,
        training=sections.training(chain.get("train")),
        layers=sections.layers(evaluation) if evaluation else None,
        neurons=sections.neurons(chain),
        cost=sections.cost(sections.costs_of(chain, source.run, source.output_dir)),
        command=without_secrets(command_line(list(source.run.overrides))),
        reports={name: sections.filled(done.manifest.table) for name, done in chain.items() if name != "evaluate"},
        config=without_secrets(source.config),
        fingerprints={name: done.manifest.fingerprint for name, done in chain.items()},
        versions=source.run.versions,
        made=time.strftime("%Y-%m-%d %H:%M", time.localtime()),
    )


def find_source(folder: Path) -> Source:
    """What the page of a run needs.

    Raises:
        ConfigError: no stage of the run was finished.
        ContractError: its record cannot be read, or the result of its last stage is gone.
    """
    folder = folder.resolve()
    run = read_run_record(folder)
    label, output_dir, config = _read_config(folder / "config.yaml")
    if not run.stages:
        command = without_secrets(command_line(list(run.overrides)))
        raise ConfigError("no stage of this run was finished", where=str(folder), do=command)
    output_dir, last = _find_result(folder, output_dir, label, run.stages[-1])
    return Source(label, run, config, last, output_dir)


def _read_config(path: Path) -> tuple[str, Path, str]:
    """Label of the model, output folder, and the settings as text."""
    try:
        config = OmegaConf.load(path)
        return str(config.model.label), Path(str(config.output_dir)), path.read_text(encoding="utf-8")
    except (OSError, ValueError, YAMLError, OmegaConfBaseException, AttributeError, TypeError, RecursionError) as error:
        raise ContractError(
            f"cannot read the settings of the run: {error}", where=str(path), do="name a folder under outputs/runs"
        ) from error


def _find_result(folder: Path, output_dir: Path, label: str, stage: StageRun) -> tuple[Path, Path]:
    """Output folder and published folder: where the settings say, or around the run's folder if that was moved."""
    for place in (output_dir, *folder.parents):
        found = artifact_folder(place, label, stage.stage, stage.fingerprint)
        if is_complete(found):
            return place, found
    raise ContractError(
        f"the result {stage.fingerprint[:16]} of this run's {stage.stage} was removed",
        where=str(artifact_folder(output_dir, label, stage.stage, stage.fingerprint)),
        do="run the command at the head of its report.md again",
    )
