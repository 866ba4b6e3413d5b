"""The section on a last stage that measured no carve: its table, its pictures, its files."""

from pipeline.report.chain import Published
from pipeline.report.numbers import size
from pipeline.report.pictures import draw_pictures
from pipeline.report.sections import folded, section
from pipeline.report.tables import draw_stage_table, draw_table
from stages.plots.markup import element

MOST_FILES = 40


def found_section(last: Published) -> str:
    """What the stage found, and what it wrote."""
    # The maps of cluster have a section of their own.
    pictures = [] if last.stage == "cluster" else draw_pictures(last)
    return section("found", f"What {last.stage} found", draw_stage_table(last.manifest.table), *pictures, _files(last))


def _files(last: Published) -> str:
    files = list(last.manifest.files.items())
    rows = [[name, size(facts.get("size"))] for name, facts in files[:MOST_FILES]]
    if len(files) > MOST_FILES:
        rows.append([f"and {len(files) - MOST_FILES} more", ""])
    if not rows:
        return ""
    folder = element("p", element("code", str(last.folder)), class_="note")
    return folded(f"Files ({len(files)})", folder, draw_table(["file", "size"], rows))
