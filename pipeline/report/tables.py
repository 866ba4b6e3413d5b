"""Tables in HTML that scroll by themselves where the page is narrow."""

from collections.abc import Sequence

from pipeline.report.numbers import plain
from stages.artifacts.job import Table
from stages.plots.markup import Markup, element, join


def draw_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, strong: int | None = None) -> Markup:
    """The table; the first column names the row, and row `strong` is the one this page is about."""
    head = element("tr", *(element("th", column, scope="col") for column in columns))
    body = [
        element("tr", _name(row[0]), *(element("td", _cell(cell)) for cell in row[1:]),
                class_="strong" if index == strong else None)
        for index, row in enumerate(rows)
    ]  # fmt: skip
    table = element("table", element("thead", head), element("tbody", *body))
    return element("div", table, class_="scroll", tabindex="0")


def draw_stage_table(table: Table, *, strong: int | None = None) -> Markup:
    """A stage's own table with its notes below; a column that no row fills is left out."""
    notes = [element("p", note, class_="note") for note in table.notes]
    filled = [place for place in range(len(table.columns)) if any(row[place] != "" for row in table.rows)]
    columns = [table.columns[place] for place in filled]
    rows = [[row[place] for place in filled] for row in table.rows]
    return join(draw_table(columns, rows, strong=strong), *notes)


def _name(cell: object) -> Markup:
    return element("th", _cell(cell), scope="row")


def _cell(cell: object) -> str:
    return cell if isinstance(cell, Markup) else plain(cell)
