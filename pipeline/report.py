"""The page of a run: one HTML file without scripts and without network access."""

import json
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from math import isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler
from matplotlib.ticker import EngFormatter, MaxNLocator

from instruments.errors import redact
from models.config import MoEShape
from pipeline.artifacts import SHORT, Manifest, is_complete
from pipeline.overrides import command_line
from pipeline.run_folder import RunRecord, StageRun
from pipeline.settings import STAGES
from stages.artifacts.job import Table
from stages.artifacts.rendering import in_mib, in_time, show
from stages.evaluate.config import BASELINES

REMEDY = "run the stage again, with fresh=true"
MAX_FIGURE = 1e30  # larger ones cannot be drawn
WIDTH, HEIGHT = 520, 240  # CSS pixels, which are matplotlib's points (72 per inch)
INK, GRID, LINES = "#7b8590", "#7b859055", ["#2f86e0", "#d96a1f"]
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
STYLE: dict[str, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "tiny-onn", "font.size": 12, "text.parse_math": False,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "axes.grid.axis": "y", "legend.frameon": False, "figure.facecolor": "none", "axes.facecolor": "none",
    "grid.color": GRID, "axes.prop_cycle": cycler(color=LINES), **dict.fromkeys(INKED, INK),
}  # fmt: skip

Points = Sequence[tuple[float, float]]  # x, y


@dataclass(frozen=True)
class Chart:
    """A chart with its title and caption; the picture is a data URI."""

    title: str
    caption: str
    picture: str


@dataclass
class Section:
    """A part of the page."""

    title: str
    charts: list[Chart] = field(default_factory=list)
    pictures: list[tuple[str, str]] = field(default_factory=list)  # title, PNG in base64
    table: Table | None = None
    folded: dict[str, Table] = field(default_factory=dict)  # title → table, shown on request
    samples: Sequence[Mapping[str, str]] = ()  # prompt, and what both models write after it


def draw_page(run: RunRecord, label: str, config: str, last: Path) -> str:
    """The page as HTML with all text escaped.

    Args:
        run: the record of the run.
        label: of the model.
        config: the run's settings as YAML.
        last: published folder of the run's last stage.
    Raises:
        ContractError, or one of UNREADABLE: results were damaged after they were published.
    """
    chain = read_chain(last)
    stage, manifest = list(chain.items())[-1]
    sections, verdict = [], ""
    if stage == "evaluate":
        evaluation = json.loads((last / "evaluation.json").read_text(encoding="utf-8"))
        verdict = describe(evaluation)
        notes = [note for note in manifest.table.notes if "\n" not in note]  # without the samples
        sections = [
            Section("Quality", table=replace(filled(manifest.table), notes=notes)),
            Section("What they write", samples=evaluation.get("samples", ())),
            layers(evaluation),
        ]
    else:
        sections = [Section(f"What {stage} found", pictures=pictures(last, manifest), table=filled(manifest.table))]
    sections += [*training(chain, last), *neurons(chain, last), costs(chain, run)]
    tables = {name: filled(done.table) for name, done in chain.items() if name != "evaluate"}
    sections.append(Section("What every stage found", folded=tables))
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["show"] = show
    return environment.get_template("page.html.j2").render(
        label=label,
        stage=stage,
        verdict=verdict,
        sections=sections,
        command=command_line(run.overrides),
        config=redact(config),
        versions=run.versions,
        made=time.strftime("%Y-%m-%d %H:%M", time.localtime()),
    )


def read_chain(last: Path) -> dict[str, Manifest]:
    """Stage → manifest, for a result and its ancestors that still exist. Raises ContractError: one is not readable."""
    found: dict[str, Manifest] = {}
    waiting = [last]
    while waiting:
        folder = waiting.pop()
        manifest = Manifest.read(folder, remedy=REMEDY)
        stage, parents = manifest.recipe["stage"], manifest.recipe["parents"]
        found[stage] = manifest
        folders = {name: _folder(last, name, mark) for name, mark in parents.items() if name not in found}
        waiting += [parent for parent in folders.values() if is_complete(parent)]
    return {name: found[name] for name in STAGES if name in found}


def _folder(last: Path, stage: str, fingerprint: str) -> Path:
    return last.parents[1] / stage / fingerprint[:SHORT]


def read_shape(record: Mapping[str, Any]) -> MoEShape:
    """The shape of the carve in evaluation.json."""
    return MoEShape(**{**record["shape"], "dense_layers": tuple(record["shape"].get("dense_layers", ()))})


def _number(value: Any) -> float:  # noqa: ANN401 - anything that JSON holds
    """A number that can be drawn; nan for others."""
    number = float(value)
    return number if isfinite(number) and abs(number) < MAX_FIGURE else nan


def describe(evaluation: Mapping[str, Any]) -> str:
    """The shape of the carve, and the loss that it costs in comparison with the static masks; of evaluation.json."""
    shape, models, width = read_shape(evaluation), evaluation["models"], evaluation["dense_width"]
    share = shape.active_share(width, len(evaluation["layers"]), evaluation.get("lacking", 0.0))
    always = f" and {shape.always_on:,} always-on neurons" if shape.always_on else ""
    pooled = " in one pool for all layers" if shape.pooled else ""
    kept = f"; layers {', '.join(map(str, shape.dense_layers))} stay dense" if shape.dense_layers else ""
    masks = [name for name in ("static_mask", "static_mask_aligned") if name in models]
    compared = "".join(f"; {BASELINES[name]}: {models[name]['gap']:+.4f}" for name in masks)
    return (
        f"{shape.experts} experts of {shape.n}{pooled}, {shape.top_k} per token{always}{kept}. Serving each token with "
        f"{share:.0%} of the FFN's {width:,} neurons costs {models['carved']['gap']:+.4f} nats per token "
        f"(perplexity {models['carved']['perplexity']:,.4g}, dense {models['dense']['perplexity']:,.4g}){compared}."
    )


def layers(evaluation: Mapping[str, Any]) -> Section:
    """Reconstruction error of each carved FFN, and its router's agreement with the oracle."""
    shape, found = read_shape(evaluation), evaluation["layers"]
    carved = [(index, layer) for index, layer in enumerate(found) if index not in shape.dense_layers]
    errors = [(index, _number(layer["error"])) for index, layer in carved]
    charts = [
        draw_lines("Reconstruction error", "Σ‖dense − MoE‖² / Σ‖dense‖² of each FFN's output on the carved model's own "
                   "inputs; 0 is the dense FFN.", {"": errors}),
    ]  # fmt: skip
    if not shape.pooled:
        agreement = [(index, _number(layer["agreement"])) for index, layer in carved]
        caption = "Share of the chosen experts that also have the largest output norm."
        charts.append(draw_lines("Router's agreement with the oracle", caption, {"routers": agreement},
                                 chance=shape.top_k / shape.experts))  # fmt: skip
    keys = [key for key, value in found[0].items() if isinstance(value, int | float)]
    rows = [[str(index), *(layer.get(key) for key in keys)] for index, layer in enumerate(found)]
    numbers = Table("", ["layer", *(key.replace("_", " ") for key in keys)], rows)
    return Section("Layer by layer", charts, folded={"The numbers": numbers})


def training(chain: Mapping[str, Manifest], last: Path) -> list[Section]:
    """Gap over the dense model and load of the experts by tokens seen."""
    if "train" not in chain:
        return []
    path = _folder(last, "train", chain["train"].fingerprint) / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    dense = float(lines[0]["dense_heldout_loss"])
    gap = {"this MoE": [(x, y - dense) for x, y in _over_tokens(lines, "heldout_loss")]}
    named = {"mean of layers": "load_max_over_mean_average", "worst layer": "load_max_over_mean"}
    load = {name: _over_tokens(lines, key) for name, key in named.items()}
    charts = [
        draw_lines("Loss gap on held-out text", "Nats over the dense model as it is, which has not been trained on.",
                   gap, x="tokens seen"),
        draw_lines("Expert load", "Largest over mean, on the text that is trained on.", load, x="tokens seen"),
    ]  # fmt: skip
    return [Section("Training", charts, table=filled(chain["train"].table))]


def _over_tokens(lines: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    """Tokens seen and value, for every step whose record has both."""
    tokens = {0: 0.0} | {line["step"]: _number(line["tokens"]) for line in lines if "tokens" in line}
    return [(tokens[line["step"]], _number(line[name])) for line in lines if name in line and line["step"] in tokens]


def neurons(chain: Mapping[str, Manifest], last: Path) -> list[Section]:
    """The maps that stage cluster drew; a run that ends there shows them first."""
    if "cluster" not in chain:
        return []
    cluster = _folder(last, "cluster", chain["cluster"].fingerprint)
    return [] if cluster == last else [Section("Neurons", pictures=pictures(cluster, chain["cluster"]))]


def pictures(folder: Path, manifest: Manifest) -> list[tuple[str, str]]:
    """Title and content of a stage's PNG files that exist."""
    paths = [folder / name for name in sorted(manifest.files) if name.endswith(".png")]
    return [
        (path.stem.replace("_", " ").capitalize(), b64encode(path.read_bytes()).decode())
        for path in paths
        if path.is_file()
    ]


def costs(chain: Mapping[str, Manifest], run: RunRecord) -> Section:
    """Time and memory of the stages that this run computed, and the fingerprints of all results."""
    done = {(stage.stage, stage.fingerprint): stage for stage in run.stages}
    rows: list[list[object]] = []
    for name, manifest in chain.items():
        stage = done.get((name, manifest.fingerprint), StageRun(name, "0"))
        time, peak = (None if stage.seconds is None else in_time(stage.seconds)), stage.peak_bytes
        rows.append([name, time or "kept", None if peak is None else in_mib(peak), manifest.fingerprint[:SHORT]])
    total = sum(stage.seconds or 0 for stage in run.stages)
    rows.append(["together", in_time(total), None, None])
    return Section("Cost", table=Table("", ["stage", "time", "peak memory", "result"], rows))


def filled(table: Table) -> Table:
    """A stage's table without empty columns."""
    places = [place for place in range(len(table.columns)) if any(row[place] != "" for row in table.rows)]
    rows = [[row[place] for place in places] for row in table.rows]
    return replace(table, columns=[table.columns[place] for place in places], rows=rows)


def draw_lines(
    title: str, caption: str, lines: Mapping[str, Points], *, x: str = "layer", chance: float | None = None
) -> Chart:
    """One or two named lines; `chance` is a share from 0 to 1 to compare with."""
    with rc_context(STYLE):  # type: ignore[arg-type] # a mapping of names that matplotlib checks
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), layout="constrained")
        axes = figure.add_subplot()
        for name, points in lines.items():
            axes.plot(*np.array(points, dtype=float).reshape(-1, 2).T, marker="o", markersize=4, label=name)
        if chance is not None:
            axes.axhline(chance, linestyle=":", color=INK, label=f"chance {chance:.0%}")
            axes.set_ylim(0, 1.04)
        axes.axhline(0, linewidth=1, color=INK)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlabel(x)
        if len(lines) > 1 or chance is not None:
            axes.legend()
        out = StringIO()
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    picture = f"data:image/svg+xml;base64,{b64encode(out.getvalue().encode()).decode()}"
    return Chart(title, caption, picture)
