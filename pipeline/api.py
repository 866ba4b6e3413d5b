"""Carve and evaluate from Python: `from tiny_onn import carve`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import RLock

from models.checkpoint.folder import expand_user
from pipeline.artifacts import Manifest, is_complete
from pipeline.cli import start
from pipeline.overrides import find_words, quote
from pipeline.plan import find_checkpoint
from stages.artifacts.job import NOTHING, Table
from stages.artifacts.rendering import render

_ONE_AT_A_TIME = RLock()  # of threads: the settings' reader and the log are the process's


@dataclass(frozen=True)
class CarveResult:
    """The checkpoint of a run, and the table of its last stage."""

    checkpoint: Path | None  # for AutoModelForCausalLM.from_pretrained; None: the stage writes or reads none
    table: Table
    figures: Mapping[str, Mapping[str, object]]  # first cell of a row → column → value

    def __str__(self) -> str:
        """The table as text, and the checkpoint's folder."""
        return f"{render(self.table, 'simple')}\n\ncheckpoint {self.checkpoint}"


def carve(
    model: str | Path = "embedded",
    *,
    data: str | Path | None = None,
    settings: Mapping[str, object] | None = None,
    **dials: object,
) -> CarveResult:
    """Carve a model and compare the result with the dense model, as `python -m pipeline` does; results are kept.

    Args:
        model: a checkpoint's folder, a model of the hub such as `Qwen/Qwen2.5-0.5B`, or an option of `conf/model`.
        data: a file or folder of text, a dataset of the hub, or an option of `conf/data`; None: that of the option of
            `conf/model`, or Python's standard library for the embedded model.
        settings: settings inside groups, such as `{"project.rounds": 0}`.
        dials: `active=0.5`, `experts=100`, `n=256`, `output_dir="outputs"`, `stage="project"` ..., and options of
            groups such as `score="wanda"`.

    Raises:
        UserError: ConfigError for wrong settings, all at once and before any weights load; others from a stage.
            After KeyboardInterrupt the same call goes on.
    """
    words = _select("model", model) + ([] if data is None else _select("data", data))
    words += [quote(name, value) for name, value in {**dials, **(settings or {})}.items()]
    with _ONE_AT_A_TIME:
        steps = start(words)
    last = steps[-1].folder
    table = Manifest.read(last, remedy="fresh=True").table if is_complete(last) else NOTHING  # plan=True runs nothing
    rows = {str(row[0]): dict(zip(table.columns[1:], map(_figure, row[1:]), strict=False)) for row in table.rows}
    return CarveResult(find_checkpoint(steps), table, rows)


def evaluate(
    model: str | Path = "embedded",
    *,
    data: str | Path | None = None,
    settings: Mapping[str, object] | None = None,
    **dials: object,
) -> CarveResult:
    """Compare a carve with the dense model and the baselines; takes what `carve` takes, and carves what is missing."""
    return carve(model, data=data, settings=settings, stage="evaluate", **dials)


def _select(group: str, chosen: str | Path) -> list[str]:
    """The words for an option of a group, a local path, or a name on the hub; an unknown one is refused later."""
    # A Path names a file or folder, even if an option has its name.
    text = str(expand_user(chosen).absolute()) if isinstance(chosen, Path) else chosen
    return find_words(group, text) or [quote(group, text)]


def _figure(cell: object) -> object:
    """A cell of a table as a number, if it is one."""
    try:
        return float(str(cell).replace(",", ""))
    except ValueError:
        return cell
