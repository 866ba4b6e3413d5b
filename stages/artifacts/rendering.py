"""Tables and quantities as text."""

from tabulate import tabulate

from stages.artifacts.job import Table


def render(table: Table, style: str) -> str:
    """A table as text with its notes below; text cells are not formatted again."""
    rows = [[show(cell) for cell in row] for row in table.rows]
    aligned = ["left", *["right"] * (len(table.columns) - 1)] if rows else None
    body = tabulate(rows, headers=list(table.columns), tablefmt=style, colalign=aligned, disable_numparse=True)
    notes = "".join(f"\n{note}" for note in table.notes)
    return f"{table.title}\n\n{body}" + (f"\n{notes}" if notes else "")


def show(cell: object, form: str = "") -> str:
    """A cell of a table, in this form, or integers with separators and floats with four digits; None is a dash."""
    if form and cell is not None:
        return format(cell, form)
    if isinstance(cell, float):
        return f"{cell:.4g}"
    if isinstance(cell, int) and not isinstance(cell, bool):
        return f"{cell:,}"
    return "–" if cell is None else str(cell)


def in_mib(size: int) -> str:
    """Bytes in MiB."""
    return f"{size / 2**20:,.1f} MiB"


def in_millions(count: int) -> str:
    """A number of parameters, in millions or billions."""
    return f"{count / 1e9:,.2f} B" if count >= 1e9 else f"{count / 1e6:,.2f} M"


def in_time(seconds: float) -> str:
    """Seconds, minutes or hours."""
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"
