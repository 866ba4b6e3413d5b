"""Tables and charts of the page's sections; page.html.j2 reads their keys."""

import json
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from instruments.errors import CheckpointError
from instruments.safetensors_files import read_facts
from pipeline.artifacts import SHORT, UNREADABLE
from pipeline.report.charts import NARROW, WIDE, draw_bars, draw_curves, draw_lines, draw_loads, draw_ridges
from pipeline.report.evaluations import Evaluation, Group, Published, curves_of, group_by_seed, point_of, seeds_of
from pipeline.report.words import duration, method_of, nats, percent, plain, size
from pipeline.run_folder import RunRecord, StageRun, read_all_records
from pipeline.shape import ShapeRequest, resolve_shape
from stages.artifacts.job import Table

Section = dict[str, Any]
MASK, AXIS_LIMIT = "static_mask", 1.6  # reference and largest value of the second chart of widths
Y_NAME = "loss gap, nats per token"
MOST_OTHERS = MOST_FILES = 40
LARGEST_PICTURE = 8 << 20  # bytes; a larger one would make the page unwieldy


def quality(evaluation: Evaluation) -> Section:
    """The table of evaluate, and the gaps as bars."""
    names, table = list(evaluation.models), evaluation.published.manifest.table
    gaps = [(method_of(name, names), evaluation.gap(name) or 0.0) for name in names if name != "dense"]
    gaps.sort(key=lambda bar: bar[1])
    return {
        "table": filled(table),
        "strong": names.index("carved") if len(names) == len(table.rows) else None,
        "bars": _fitting(lambda width: draw_bars("Loss gap of every model measured", gaps, width)),
    }


def widths(evaluation: Evaluation) -> Section:
    """Curves of this carve over the active width, and other carves of the same source for comparison."""
    groups = group_by_seed([evaluation, *evaluation.find_comparable()])
    mine = [group for group in groups if evaluation.is_same_method(group[0])]
    others = [group for group in groups if group not in mine]
    names = list(evaluation.models)
    strays = [point for group in others if (point := point_of(group, "carved"))]
    curves = {method_of(name, names): points for name, points in curves_of(mine, names).items()}
    compared = curves_of(mine, names, MASK) if len(mine) > 1 else {}
    shown = {name: points for name, points in compared.items() if max(point.mean for point in points) <= AXIS_LIMIT}
    parts = {method_of(name, names): points for name, points in shown.items()}
    rows = [[method_of(name, names).name, *(_gap(group, name) for group in mine)] for name in names]
    rows.append(["seeds", *(", ".join(map(str, seeds_of(group))) for group in mine)])
    title = "Loss gap against the share of active FFN neurons, one curve per method"
    part_title = "Loss gap as a part of the static mask's, one curve per method"
    return {
        "curves": _fitting(lambda width: draw_curves(title, Y_NAME, curves, width, strays=strays, dense=True)),
        "parts": parts
        and _fitting(lambda width: draw_curves(part_title, "gap ÷ gap of the static mask", parts, width)),
        "most": AXIS_LIMIT,
        "another": another_width(evaluation) if len(mine) == 1 else "",
        "seeds": max(len(seeds_of(group)) for group in mine),
        "numbers": Table("", ["model", *(f"{percent(group[0].share)} active" for group in mine)], rows),
        "strong": names.index("carved"),
        "others": len(others),
        "other_carves": _other_carves(others, evaluation),
    }


def another_width(evaluation: Evaluation) -> str:
    """Settings that add a point to the curve: the same experts at another active share; empty if there are none."""
    shape, source = evaluation.shape, {"num_hidden_layers": len(evaluation.layers)}
    experts = shape.experts, shape.n, None, None
    for share in (0.25, 0.75, 0.5):
        request = ShapeRequest(*experts, share, shape.topology, source=source, dense_layers=shape.dense_layers)
        if request.carved_share > 0 and resolve_shape(request, evaluation.width).active_width != shape.active_width:
            return f"experts={shape.experts} n={shape.n} top_k=null always_on=null active={share}"
    return ""


def _gap(group: Group, name: str) -> str:
    point = point_of(group, name)
    return nats(point.mean) if point else "–"


def _other_carves(groups: Sequence[Group], wanted: Evaluation) -> Table:
    rows = []
    for group in groups[:MOST_OTHERS]:
        shape, seeds = group[0].shape, ", ".join(map(str, seeds_of(group)))
        different = _difference(group[0].settings, wanted.settings)
        experts = f"{shape.top_k} of {shape.experts} × {shape.n}"
        gaps = _gap(group, "carved"), _gap(group, "static_mask_aligned")
        rows.append([different, percent(group[0].share), experts, plain(shape.always_on), seeds, *gaps])
    left = len(groups) - len(rows)
    columns = ["other settings", "active", "experts", "always on", "seeds", "this MoE", "static mask, aligned"]
    return Table("", columns, rows, [f"{left} more are not listed."] if left else [])


def _difference(settings: Mapping[str, object], wanted: Mapping[str, object]) -> str:
    """The settings that differ from those of this run."""
    keys = [key for key in sorted({*settings, *wanted}) if settings.get(key) != wanted.get(key)]
    words = [f"{key}={plain(settings.get(key))}" for key in keys]
    if len(words) > 6:
        words = [*words[:6], f"and {len(words) - 6} more"]
    return ", ".join(words) or "none"


def training(published: Published | None) -> Section | None:
    """Gap over the dense model and load of the experts by tokens seen; None without a readable record."""
    if published is None:
        return None
    keys = ["tokens", "loss", "heldout_loss", "heldout_divergence", "load_max_over_mean", "dead_experts"]
    keys += ["router_entropy", "gradient_norm"]
    try:
        text = (published.folder / "metrics.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        gap = {"this MoE": _over_tokens(lines, "heldout_loss", float(lines[0]["dense_heldout_loss"]))}
        named = {"mean of layers": "load_max_over_mean_average", "worst layer": "load_max_over_mean"}
        load = {name: _over_tokens(lines, key) for name, key in named.items()}
        rows = [[str(line["step"]), line["phase"], *(line.get(key) for key in keys)] for line in lines]
    except UNREADABLE:
        return None
    return {
        "gap": [draw_lines("Loss gap on held-out text", "nats over dense", gap, x_name="tokens seen")],
        "load": [draw_lines("Expert load", "largest over mean", load, x_name="tokens seen")],
        "table": filled(published.manifest.table),
        "numbers": Table("", ["step", "phase", *(key.replace("_", " ") for key in keys)], rows),
    }


def _over_tokens(lines: Sequence[Mapping[str, Any]], name: str, base: float = 0.0) -> list[tuple[float, float, str]]:
    """Tokens seen, value minus `base`, and both as text, for every step whose record has both."""
    tokens = {0: 0.0} | {line["step"]: float(line["tokens"]) for line in lines if "tokens" in line}
    found = [(tokens[line["step"]], line[name] - base) for line in lines if name in line and line["step"] in tokens]
    return [(x, float(y), f"{x:,.0f} tokens: {y:.4f}") for x, y in found]


def layers(evaluation: Evaluation) -> Section | None:
    """Reconstruction error of each carved FFN, its router's agreement with the oracle, and the experts' load."""
    found, shape = evaluation.layers, evaluation.shape
    if not found:
        return None
    chance, oracle = shape.top_k / shape.experts, "error oracle" if shape.pooled else "output oracle"
    errors = [(index, layer["error"], f"layer {index}: {layer['error']:.4f}") for index, layer in enumerate(found)]
    choices = [(index, layer["agreement"]) for index, layer in enumerate(found)]
    agreement = [(index, share, f"layer {index}: {percent(share)}") for index, share in choices]
    loads = [layer["load"] for layer in found]
    keys = [key for key, value in found[0].items() if isinstance(value, int | float)]
    rows = [[str(index), *(layer.get(key) for key in keys)] for index, layer in enumerate(found)]
    return {
        "error": [draw_lines("Reconstruction error of every layer", "Σ‖dense − MoE‖² / Σ‖dense‖²", {"": errors})],
        "agreement": [draw_lines(f"Router's agreement with the {oracle} in every layer", "share of choices",
                                 {"": agreement}, reference=(chance, f"chance {percent(chance)}"))],
        "oracle": oracle,
        "pooled": shape.pooled,
        "loads": _fitting(lambda width: draw_loads("Expert load by layer", loads, width)) if all(loads) else [],
        "numbers": Table("", ["layer", *(key.replace("_", " ") for key in keys)], rows),
    }  # fmt: skip


def neurons(chain: Mapping[str, Published]) -> Section | None:
    """Distributions of the neurons' scores, and the maps that stage cluster drew."""
    section: Section = {"maps": pictures(chain.get("cluster")), "scores": [], "name": ""}
    if "score" in chain:
        try:
            name, scores_LF = _read_scores(chain["score"].folder / "scores.safetensors")
        except (*UNREADABLE, SafetensorError, CheckpointError):
            pass  # removed, damaged or of another version: the page leaves the scores out
        else:
            title, section["name"] = f"Distribution of {name} in every layer", name
            section["scores"] = _fitting(lambda width: draw_ridges(title, name, scores_LF, width))
    return section if section["maps"] or section["scores"] else None


def _read_scores(path: Path) -> tuple[str, NDArray[np.float64]]:
    """Name of the score, and (L, F) scores. Raises any of UNREADABLE, SafetensorError, CheckpointError: damaged."""
    with safe_open(path, framework="numpy") as file:
        name = str(read_facts(path)["plain"]["description"]).replace("s_p", "S_p")
        scores_LF: NDArray[np.float64] = file.get_tensor("chosen").astype(np.float64)
    if scores_LF.ndim != 2 or not scores_LF.size or not np.isfinite(scores_LF).all():
        raise ValueError("not a finite score for every neuron of every layer")
    return name, scores_LF


def pictures(published: Published | None) -> list[dict[str, str]]:
    """The PNG files of a stage that exist and are not too large."""
    found = []
    for name in sorted(published.manifest.files) if published else []:
        path = published.folder / name if published else Path()
        if name.endswith(".png") and path.is_file() and path.stat().st_size <= LARGEST_PICTURE:
            layer = path.stem.removeprefix("neuron_map_layer_")
            title = f"Map of layer {int(layer)}" if layer.isdecimal() else path.stem.replace("_", " ").capitalize()
            words = f"{title}: neurons by expert, score and frequency" if layer.isdecimal() else title
            found.append({"title": title, "words": words, "data": b64encode(path.read_bytes()).decode()})
    return found


@dataclass(frozen=True)
class Cost:
    """Cost of one stage; None where no recorded run computed it."""

    stage: str
    tokens: int | None  # calibration tokens it may read
    seconds: float | None
    peak_bytes: int | None
    here: bool  # this run computed it


def costs_of(chain: Mapping[str, Published], run: RunRecord, output_dir: Path) -> list[Cost]:
    """The stages in the order of the chain; a kept stage has the cost of the run that computed it."""
    records, costs = [run, *read_all_records(output_dir)], []
    for name, published in chain.items():
        address, tokens = published.manifest.fingerprint[:SHORT], published.tokens
        same = ((done, record is run) for record in records for done in record.stages
                if (done.stage, done.fingerprint[:SHORT]) == (name, address) and done.seconds is not None)  # fmt: skip
        done, here = next(same, (StageRun(name, address), False))
        costs.append(Cost(name, tokens, done.seconds, done.peak_bytes, here))
    return costs


def cost(costs: Sequence[Cost]) -> Section:
    """Tokens, time and memory of every stage."""
    rows: list[list[object]] = [
        [cost.stage, cost.tokens, duration(cost.seconds), size(cost.peak_bytes), "this run" if cost.here else "kept"]
        for cost in costs
    ]
    seconds = [cost.seconds for cost in costs if cost.seconds is not None]
    peaks = [cost.peak_bytes for cost in costs if cost.peak_bytes is not None]
    if seconds:
        rows.append(["together", None, duration(sum(seconds)), size(max(peaks, default=None)), ""])
    note = "Time and memory of a kept stage are those of the run that computed it, where that is on record."
    columns = ["stage", "calibration tokens, at most", "time", "peak memory", "computed in"]
    kept = any(not cost.here for cost in costs)
    return {"table": Table("", columns, rows, [note] if kept else []), "strong": len(costs) if seconds else None}


def found(last: Published) -> Section:
    """Results and files of a last stage other than evaluate."""
    files = list(last.manifest.files.items())
    rows = [[name, size(facts.get("size"))] for name, facts in files[:MOST_FILES]]
    if len(files) > MOST_FILES:
        rows.append([f"and {len(files) - MOST_FILES} more", ""])
    return {
        "stage": last.stage,
        "table": filled(last.manifest.table),
        "pictures": [] if last.stage == "cluster" else pictures(last),  # section neurons shows the maps of cluster
        "folder": str(last.folder),
        "count": len(files),
        "files": Table("", ["file", "size"], rows),
    }


def filled(table: Table) -> Table:
    """A stage's table without empty columns."""
    places = [place for place in range(len(table.columns)) if any(row[place] != "" for row in table.rows)]
    rows = [[row[place] for place in places] for row in table.rows]
    return replace(table, columns=[table.columns[place] for place in places], rows=rows)


def _fitting(draw: Callable[[int], Markup]) -> list[Markup]:
    """The chart for narrow and for wide pages; the style sheet shows one of them."""
    return [draw(NARROW), draw(WIDE)]
