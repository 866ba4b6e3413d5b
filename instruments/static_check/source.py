"""A file of Python code or a notebook; the rules, and findings in the file."""

import ast
import io
import json
import re
import tokenize
import tomllib
import warnings
from dataclasses import dataclass, field
from pathlib import Path

SEVERE, WARNING, NOTE = "severe", "warning", "note"
GRADES = (NOTE, WARNING, SEVERE)
# By code: severity, why, fix, and examples, with which the tests check each rule.
RULES = tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))


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
    unread: list[Finding] = field(default_factory=list)  # cells that cannot be parsed

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
    try:
        notebook = path.suffix == ".ipynb"
        return _read_notebook(path, data) if notebook else Source(str(path), _parse(data), find_silenced(data))
    except SyntaxError as error:
        return unreadable(path, error.lineno or 1, f"does not parse: {error.msg}")
    except (ValueError, RecursionError, MemoryError) as error:
        return unreadable(path, 1, f"does not parse: {error}")


def _parse(code: bytes | str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as invalid escapes, which are no precision faults
        return ast.parse(code)


# IPython syntax: `%magic`, `!command`, `?help`, `help?`.
_MAGIC = re.compile(r"(?P<indent>\s*)(?:[%!?]|[\w.]+\?+\s*$|[\w, ]+=\s*[%!])")
# Cells that hold another language. The code after other cell magics, such as %%prun, is Python.
_FOREIGN = re.compile(
    r"\s*%%(?!(?:writefile|file)\b.*\.py\s*$)"
    r"(?:writefile|file|bash|sh|script|cmd|html|javascript|js|latex|markdown|svg|perl|ruby|cython|sql|bigquery|R)\b",
    re.IGNORECASE | re.MULTILINE,
)


def _read_notebook(path: Path, data: bytes) -> Source:
    """Parse a notebook cell by cell. Raises ValueError: no notebook of version 4."""
    notebook = json.loads(data)
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        raise ValueError("no notebook of version 4")
    source = Source(str(path), ast.Module([], []), {})
    for number, cell in enumerate(notebook["cells"], 1):
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        text = "".join(cell.get("source", ""))
        if _FOREIGN.match(text):
            continue
        try:
            code, tree = _parse_cell(text)
        except SyntaxError as error:
            lines = min(error.lineno or 1, text.count("\n") + 1)
            source.unread.append(unreadable(Path(f"{path}[cell {number}]"), lines, f"does not parse: {error.msg}"))
            continue
        above = len(source.cells)
        source.tree.body.extend(ast.increment_lineno(node, above) for node in tree.body)
        source.silenced.update({above + line: codes for line, codes in find_silenced(code.encode()).items()})
        source.cells.extend((f"cell {number}", line) for line in range(1, code.count("\n") + 2))
    return source


def _parse_cell(code: str) -> tuple[str, ast.Module]:
    """Code and tree of a cell; lines in IPython's own syntax, with those that continue them, become `pass`."""
    try:
        return code, _parse(code)
    except SyntaxError:
        lines: list[tuple[str, str]] = []
        magic = False
        for line in code.split("\n"):
            continued = magic and lines[-1][1].endswith("\\")
            match = _MAGIC.match(line)
            magic = continued or match is not None
            lines.append(("" if continued else f"{match['indent']}pass" if match else line, line.rstrip()))
        code = "\n".join(kept for kept, _line in lines)
        return code, _parse(code)


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
