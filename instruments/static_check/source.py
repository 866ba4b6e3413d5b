"""A file of Python code or a notebook, and findings in it."""

import ast
import io
import json
import re
import tokenize
import warnings
from dataclasses import dataclass, field
from pathlib import Path

SEVERE, WARNING, NOTE = "severe", "warning", "note"
GRADES = (NOTE, WARNING, SEVERE)


@dataclass(frozen=True, order=True)
class Finding:
    """A broken rule at one place of a file."""

    path: str
    line: int
    column: int
    code: str
    message: str
    severity: str
    why: str
    fix: str

    def __str__(self) -> str:
        """Three lines: place and message, reason, fix."""
        head = f"{self.path}:{self.line}: {self.code} {self.severity} {self.message}"
        return f"{head}\n    why: {self.why}\n    fix: {self.fix}"

    def record(self) -> dict[str, object]:
        """All fields, for JSON."""
        return dict(vars(self))


_NOQA = re.compile(r"#.*?\bnoqa\b(?::\s*(?P<codes>[A-Z]+[0-9]+(?:[\s,]+[A-Z]+[0-9]+)*))?", re.IGNORECASE)
MAX_LINES, MAX_BYTES = 20_000, 4 << 20  # longer files are generated code, and take minutes
EVERY: frozenset[str] = frozenset({"*"})


@dataclass(frozen=True)
class Source:
    """A parsed file."""

    path: str
    tree: ast.Module
    silenced: dict[int, frozenset[str]]  # line → codes, or EVERY
    cells: list[tuple[str, int]] = field(default_factory=list)  # of a notebook: (cell, line in it) for each line

    def is_silenced(self, code: str, node: ast.expr) -> bool:
        """Whether a `noqa` comment on one of the node's lines silences the rule."""
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        return any(self.silenced.get(line, frozenset()) & {code, *EVERY} for line in lines)

    def place(self, line: int) -> tuple[str, int]:
        """File and line; for a notebook, the cell and the line in it."""
        if not self.cells:
            return self.path, line
        cell, line = self.cells[line - 1]
        return f"{self.path}[{cell}]", line


def read_source(path: Path) -> Source | Finding:
    """Parse a file; a finding with the reason if it cannot be checked."""
    if not path.is_file():
        return unreadable(path, 1, "is no regular file")
    try:
        size = path.stat().st_size
        data = path.read_bytes() if size <= MAX_BYTES else b""
    except OSError as error:
        return unreadable(path, 1, f"cannot be read: {error.strerror}")
    if size > MAX_BYTES or data.count(b"\n") > MAX_LINES:
        return unreadable(path, 1, f"is longer than {MAX_LINES:,} lines or {MAX_BYTES:,} bytes, and not checked")
    cells: list[tuple[str, int]] = []
    try:
        if path.suffix == ".ipynb":
            data, cells = join_cells(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as invalid escapes, which are no precision faults
            tree = ast.parse(data, filename=str(path))
        return Source(str(path), tree, find_silenced(data), cells)
    except SyntaxError as error:
        place, line = str(path), error.lineno or 1
        if cells:
            place, line = Source(place, ast.Module([], []), {}, cells).place(min(line, len(cells)))
        return unreadable(Path(place), line, f"does not parse: {error.msg}")
    except (ValueError, RecursionError, MemoryError) as error:
        return unreadable(path, 1, f"does not parse: {error}")


# IPython syntax: `%magic`, `!command`, `?help`, `help?`.
_MAGIC = re.compile(r"(?P<indent>\s*)(?:[%!?]|[\w.]+\?+\s*$|[\w, ]+=\s*[%!])")


def join_cells(data: bytes) -> tuple[bytes, list[tuple[str, int]]]:
    """Code of a notebook, and cell and line of each of its lines. Raises ValueError: no notebook of version 4."""
    notebook = json.loads(data)
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        raise ValueError("no notebook of version 4")
    lines: list[str] = []
    places: list[tuple[str, int]] = []
    for number, cell in enumerate(notebook["cells"], 1):
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        text = "".join(cell.get("source", ""))
        if text.lstrip().startswith("%%") and not re.match(r"\s*%%(?:time|capture|timeit)\b", text):
            continue  # another language
        for line, code in enumerate(text.split("\n"), 1):
            match = _MAGIC.match(code)
            lines.append(f"{match['indent']}pass" if match else code)
            places.append((f"cell {number}", line))
    return "\n".join(lines).encode(), places or [("no code", 1)]


def find_silenced(data: bytes) -> dict[int, frozenset[str]]:
    """Silenced codes of lines with `# noqa` or `# noqa: CODE, CODE`."""
    if b"noqa" not in data.lower():
        return {}
    found = {}
    for token in tokenize.tokenize(io.BytesIO(data).readline):
        match = _NOQA.search(token.string) if token.type == tokenize.COMMENT else None
        if match:
            codes = match["codes"]
            found[token.start[0]] = frozenset(re.findall(r"[A-Z]+[0-9]+", codes.upper())) if codes else EVERY
    return found


UNREADABLE = "LP001"


def unreadable(path: Path, line: int, message: str) -> Finding:
    """Finding for a file that cannot be checked."""
    fix = "correct the file, or leave it out: --exclude"
    return Finding(str(path), line, 0, UNREADABLE, message, SEVERE, "nothing in it was checked", fix)
