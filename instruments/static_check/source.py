"""A file of Python code or a notebook; the rules, and findings in the file."""

import ast
import io
import json
import re
import tokenize
import tomllib
import warnings
from dataclasses import dataclass, field
from functools import cached_property
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
EVERY: frozenset[str] = frozenset({"*"})


@dataclass(frozen=True)
class Source:
    """A parsed file."""

    path: str
    tree: ast.Module
    code: list[tuple[int, bytes]]  # lines above, code
    cells: list[tuple[str, int]] = field(default_factory=list)  # of a notebook: (cell, line in it) for each line
    unread: list[Finding] = field(default_factory=list)  # cells that cannot be parsed

    @cached_property
    def silenced(self) -> dict[int, frozenset[str]]:
        """Line → codes silenced there, or EVERY; looked for at the first finding."""
        return {above + line: codes for above, code in self.code for line, codes in find_silenced(code).items()}

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
    try:
        data = path.read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as invalid escapes, which are no precision faults
            if path.suffix == ".ipynb":
                return _read_notebook(path, data)
            return Source(str(path), ast.parse(data), [(0, data)])
    except OSError as error:
        return unreadable(path, 1, f"cannot be read: {error.strerror}")
    except SyntaxError as error:
        return unreadable(path, error.lineno or 1, f"does not parse: {error.msg}")
    except (ValueError, KeyError, TypeError, RecursionError, MemoryError) as error:
        return unreadable(path, 1, f"does not parse: {error}")


# IPython syntax and the lines that continue it: `%magic`, `!command`, `?help`, `help?`, `files = !ls`.
_MAGIC = re.compile(r"^([ \t]*)(?:[%!?]|[\w.]+\?+[ \t]*$|[\w, ]+=[ \t]*[%!])(?:.*\\\n)*.*", re.MULTILINE)


def _read_notebook(path: Path, data: bytes) -> Source:
    """All code cells as one tree; a cell that does not parse is a finding, after `%%` another language."""
    source = Source(str(path), ast.Module([], []), [])
    for number, cell in enumerate(json.loads(data)["cells"], 1):
        if cell["cell_type"] != "code":
            continue
        code = "".join(cell["source"])
        try:
            try:
                tree = ast.parse(code)
            except SyntaxError:
                code = _MAGIC.sub(lambda match: f"{match[1]}pass" + "\n" * match[0].count("\n"), code)
                tree = ast.parse(code)
        except SyntaxError as error:
            if not "".join(cell["source"]).startswith("%%"):
                place = Path(f"{path}[cell {number}]")
                source.unread.append(unreadable(place, error.lineno or 1, f"does not parse: {error.msg}"))
            continue
        above = len(source.cells)
        source.tree.body.extend(ast.increment_lineno(node, above) for node in tree.body)
        source.code.append((above, code.encode()))
        source.cells.extend((f"cell {number}", line) for line in range(1, code.count("\n") + 2))
    return source


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
