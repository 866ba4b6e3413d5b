"""A file of Python: its tree, its lines that ask for silence, or why it cannot be read."""

import ast
import io
import re
import tokenize
import warnings
from dataclasses import dataclass
from pathlib import Path

from instruments.static_check.rules import RULES, Finding

_NOQA = re.compile(r"#.*?\bnoqa\b(?::\s*(?P<codes>[A-Z]+[0-9]+(?:[\s,]+[A-Z]+[0-9]+)*))?", re.IGNORECASE)
EVERY: frozenset[str] = frozenset({"*"})


@dataclass(frozen=True)
class Source:
    """A file that parses."""

    path: str
    tree: ast.Module
    silenced: dict[int, frozenset[str]]  # line → codes, or EVERY

    def is_silenced(self, code: str, node: ast.AST) -> bool:
        """Whether a comment on one of the node's lines says so."""
        first = getattr(node, "lineno", 1)
        lines = range(first, (getattr(node, "end_lineno", None) or first) + 1)
        return any(self.silenced.get(line, frozenset()) & {code, *EVERY} for line in lines)


def read_source(path: Path) -> Source | Finding:
    """The file, or a finding that says why not."""
    try:
        data = path.read_bytes()
    except OSError as error:
        return _unreadable(path, 1, f"cannot be read: {error.strerror}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes and the like: not ours to report
            tree = ast.parse(data, filename=str(path))
        return Source(str(path), tree, find_silenced(data))
    except SyntaxError as error:
        return _unreadable(path, error.lineno or 1, f"does not parse: {error.msg}")
    except (ValueError, RecursionError, MemoryError) as error:
        return _unreadable(path, 1, f"does not parse: {error}")


def find_silenced(data: bytes) -> dict[int, frozenset[str]]:
    """Lines with `# noqa` or `# noqa: CODE, CODE`."""
    if b"noqa" not in data.lower():
        return {}
    found = {}
    for token in tokenize.tokenize(io.BytesIO(data).readline):
        match = _NOQA.search(token.string) if token.type == tokenize.COMMENT else None
        if match:
            codes = match["codes"]
            found[token.start[0]] = frozenset(re.findall(r"[A-Z]+[0-9]+", codes.upper())) if codes else EVERY
    return found


def _unreadable(path: Path, line: int, message: str) -> Finding:
    return Finding(str(path), line, 0, "LP001", message, RULES["LP001"].severity)
