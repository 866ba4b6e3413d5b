"""Sections on how the carve was made: cost, what every stage said, settings, versions and fingerprints."""

import re
from collections.abc import Mapping, Sequence

from models.config import MoEShape
from pipeline.command import command_line
from pipeline.report.chain import Published
from pipeline.report.costs import Cost
from pipeline.report.numbers import duration, plain, size
from pipeline.report.run_record import RunRecord
from pipeline.report.sections import folded, paragraph, section
from pipeline.report.tables import draw_stage_table, draw_table
from stages.plots.markup import Markup, element, join

SECRET = re.compile(r"(?<=://)[^/\s@]+@")  # user and password in an address


def cost_section(costs: Sequence[Cost]) -> Markup:
    """Tokens, time and memory of every stage."""
    rows = [
        [cost.stage, cost.tokens, duration(cost.seconds), size(cost.peak_bytes), "this run" if cost.here else "kept"]
        for cost in costs
    ]
    known = [cost.seconds for cost in costs if cost.seconds is not None]
    peaks = [cost.peak_bytes for cost in costs if cost.peak_bytes is not None]
    if known:
        rows.append(["together", None, duration(sum(known)), size(max(peaks, default=None)), ""])
    columns = ["stage", "calibration tokens, at most", "time", "peak memory", "computed in"]
    note = "Time and memory of a kept stage are those of the run that computed it, where that is on record."
    kept = any(not cost.here for cost in costs)
    strong = len(rows) - 1 if known else None
    return section("cost", "Cost", draw_table(columns, rows, strong=strong), paragraph(note, "note") if kept else "")


def making_section(chain: Mapping[str, Published], run: RunRecord, config: str) -> Markup:
    """All that is needed to make it again."""
    command = without_secrets(command_line(list(run.overrides)))
    prints = [[name, element("code", published.manifest.fingerprint)] for name, published in chain.items()]
    reports = [
        join(element("h3", name), draw_stage_table(published.manifest.table))
        for name, published in chain.items()
        if name != "evaluate"
    ]
    versions = [[name, version] for name, version in run.versions.items()]
    return section(
        "making",
        "How it was made",
        element("pre", element("code", command), tabindex="0"),
        folded("What every stage found", *reports) if reports else "",
        folded("Settings", element("pre", element("code", without_secrets(config)), tabindex="0")) if config else "",
        folded("Fingerprints", draw_table(["stage", "fingerprint"], prints)),
        folded("Versions", draw_table(["package", "version"], versions)) if versions else "",
    )


def without_secrets(words: str) -> str:
    """The words with users and passwords of addresses left out."""
    return SECRET.sub("…@", words)


def shape_words(shape: MoEShape) -> str:
    """What the source became."""
    always = f" and {plain(shape.always_on)} always-on neurons" if shape.always_on else ""
    pooled = " in one pool for all layers" if shape.pooled else ""
    return f"{shape.experts} experts of {shape.n}{pooled}, {shape.top_k} per token{always}"
