"""Carve and evaluate from Python: `from tiny_onn import carve`."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from instruments.errors import ConfigError
from models.config import setting_word
from pipeline.artifacts import Manifest, is_complete
from pipeline.cli import start
from pipeline.help import groups
from pipeline.plan import find_checkpoint
from stages.artifacts.job import NOTHING, Table
from stages.artifacts.rendering import render

# Group → its option for a path.
LOCAL = {"model": "local", "data": "text"}


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
    data: str | Path = "python_stdlib",
    settings: Mapping[str, object] | None = None,
    **dials: object,
) -> CarveResult:
    """Carve a model and compare the result with the dense model, as `python -m pipeline` does; results are kept.

    Args:
        model: a checkpoint's folder, a model of the hub such as `Qwen/Qwen2.5-0.5B`, or an option of `conf/model`.
        data: a file or folder of text, a dataset of the hub, or an option of `conf/data`.
        settings: settings inside groups, such as `{"project.rounds": 0}`.
        dials: `active=0.5`, `experts=100`, `n=256`, `output_dir="outputs"`, `stage="project"` ..., and options of
            groups such as `score="wanda"`.

    Raises:
        UserError: ConfigError for wrong settings, all at once and before any weights load; others from a stage.
            After KeyboardInterrupt the same call goes on.
    """
    words = [*_select("model", model), *_select("data", data)]
    for name, value in {**dials, **(settings or {})}.items():
        words.append(_word(name, value))
    steps = start(words)
    last = steps[-1].folder
    table = Manifest.read(last, remedy="fresh=True").table if is_complete(last) else NOTHING  # plan=True runs nothing
    rows = {str(row[0]): dict(zip(table.columns[1:], map(_figure, row[1:]), strict=False)) for row in table.rows}
    return CarveResult(find_checkpoint(steps), table, rows)


def evaluate(
    model: str | Path = "embedded",
    *,
    data: str | Path = "python_stdlib",
    settings: Mapping[str, object] | None = None,
    **dials: object,
) -> CarveResult:
    """Compare a carve with the dense model and the baselines; takes what `carve` takes, and carves what is missing."""
    return carve(model, data=data, settings=settings, stage="evaluate", **dials)


def _figure(cell: object) -> object:
    """A cell of a table as a number, if it is one."""
    try:
        return float(str(cell).replace(",", ""))
    except ValueError:
        return cell


def _select(group: str, chosen: str | Path) -> list[str]:
    """The words for an option of a group, a local path, or a name on the hub."""
    text = str(chosen)
    if isinstance(chosen, str) and chosen in groups()[group]:
        return [f"{group}={chosen}"]
    if Path(text).exists():
        words, label = [f"{group}={LOCAL[group]}", _word(f"{group}.path", text)], Path(text).resolve().name
    elif text.count("/") == 1 and not text.startswith((".", "/", "~")):
        words, label = [f"{group}=hub", _word(f"{group}.name", text)], text.partition("/")[2]
    else:
        what = f"{group}={text!r} is no file or folder, no name on the hub such as owner/name, and no option"
        raise ConfigError(what, where="carve", do=f"a path that exists, or one of {', '.join(groups()[group])}")
    return [*words, f"model.label={re.sub(r'[^a-zA-Z0-9.+-]+', '_', label)}"] if group == "model" else words


def _word(name: str, value: object) -> str:
    """A setting as a word of the command line."""
    return f"{name}={_value(value)}"


def _value(value: object) -> str:
    """A value as Hydra reads it."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_value(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_value, value))}]"
    if isinstance(value, str | Path):
        return shlex.split(setting_word("", str(value)))[0][1:]
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
