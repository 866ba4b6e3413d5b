"""The page of a run: one HTML file without scripts and without network access."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from instruments.errors import ConfigError, ContractError, redact
from instruments.files import write_text
from pipeline.artifacts import SHORT, artifact_folder, is_complete
from pipeline.overrides import command_line
from pipeline.report import sections
from pipeline.report.charts import COLOURS
from pipeline.report.evaluations import Published, read_chain, read_evaluation, read_published
from pipeline.report.words import key_figures, plain, shape_words, verdict
from pipeline.run_folder import RunRecord, StageRun, read_run_record

FILE = "report.html"


@dataclass(frozen=True)
class Source:
    """Input of a page."""

    label: str
    run: RunRecord
    config: str  # the run's settings as YAML
    last: Path  # published folder of the run's last stage
    output_dir: Path


def write_page(source: Source, out: Path) -> Path:
    """Write the page of a run. Raises ContractError: the last stage's result cannot be read; OSError: no writing."""
    write_text(out, draw_page(source))
    return out


def draw_page(source: Source) -> str:
    """The page as HTML with all text escaped. Raises ContractError: the last stage's result cannot be read."""
    last = read_published(source.last)
    chain = read_chain(last)
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["plain"] = plain
    return environment.get_template("page.html.j2").render(
        colours=COLOURS,
        label=source.label,
        **_main_parts(last),
        training=sections.training(chain.get("train")),
        neurons=sections.neurons(chain),
        cost=sections.cost(sections.costs_of(chain, source.run, source.output_dir)),
        command=command_line(source.run.overrides),
        reports={name: sections.filled(done.manifest.table) for name, done in chain.items() if name != "evaluate"},
        config=redact(source.config),
        fingerprints={name: done.manifest.fingerprint for name, done in chain.items()},
        versions=source.run.versions,
        made=time.strftime("%Y-%m-%d %H:%M", time.localtime()),
    )


def _main_parts(last: Published) -> dict[str, Any]:
    """The parts that show an evaluation, or the results of another last stage."""
    absent = dict.fromkeys(("verdict", "tiles", "found", "quality", "widths", "layers"))
    if last.stage != "evaluate":
        return {**absent, "heading": last.stage, "found": sections.found(last)}
    evaluation = read_evaluation(last.folder)
    return {
        **absent,
        "heading": shape_words(evaluation.shape),
        "verdict": verdict(evaluation),
        "tiles": key_figures(evaluation),
        "quality": sections.quality(evaluation),
        "widths": sections.widths(evaluation),
        "layers": sections.layers(evaluation),
    }


def find_source(folder: Path) -> Source:
    """Input of a run's page. Raises UserError: its record or last result is missing, or the run finished no stage."""
    folder = folder.resolve()
    run = read_run_record(folder)
    label, output_dir, config = _read_config(folder / "config.yaml")
    if not run.stages:
        command = command_line(run.overrides)
        raise ConfigError("no stage of this run was finished", where=str(folder), do=command)
    output_dir, last = _find_result(folder, output_dir, label, run.stages[-1])
    return Source(label, run, config, last, output_dir)


def _read_config(path: Path) -> tuple[str, Path, str]:
    """Label of the model, output folder, and the settings as text."""
    try:
        config = OmegaConf.load(path)
        return str(config.model.label), Path(str(config.output_dir)), path.read_text(encoding="utf-8")
    except (OSError, ValueError, YAMLError, OmegaConfBaseException, AttributeError, TypeError, RecursionError) as error:
        what = f"cannot read the settings of the run: {error}"
        raise ContractError(what, where=str(path), do="name a folder under outputs/runs") from error


def _find_result(folder: Path, output_dir: Path, label: str, stage: StageRun) -> tuple[Path, Path]:
    """Output folder and published folder of a stage: as in the settings, or above the run's folder if it was moved."""
    for place in (output_dir, *folder.parents):
        found = artifact_folder(place, label, stage.stage, stage.fingerprint)
        if is_complete(found):
            return place, found
    what = f"the result {stage.fingerprint[:SHORT]} of this run's {stage.stage} was removed"
    where = str(artifact_folder(output_dir, label, stage.stage, stage.fingerprint))
    raise ContractError(what, where=where, do="run the command at the head of its report.md again")
