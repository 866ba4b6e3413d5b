"""The running interpreter's standard library as text; needs no network and no third-party data."""

import ast
import re
import sys
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from instruments.errors import DataError
from stages.text.config import Split
from stages.text.documents import Document, cut_passages, digest_of, interleave, is_heldout

# Tables instead of text, parts that some installations omit, and tests.
EXCLUDED_MODULES = frozenset({"encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "tkinter", "turtledemo"})
EXCLUDED_FOLDERS = frozenset({"__pycache__", "test", "tests", "site-packages", "dist-packages"})
# A document ends at the first blank line after this many characters, or at the first line end after twice as many.
DOCUMENT_CHARACTERS = 1_000

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def read_stdlib(heldout_share: float, split: Split) -> Iterator[Document]:
    """The documents of one split, one of each module in turn.

    Every second module begins with its docstrings, the others with their source (without docstrings), so that every
    part of the text holds about as much of both. Raises DataError: the library was installed without its source.
    """
    modules = list_modules()
    places = enumerate(choose_modules(modules, heldout_share, split))
    return interleave(read_module(name, modules[name], docstrings_first=place % 2 == 0) for place, name in places)


def choose_modules(names: Iterable[str], heldout_share: float, split: Split) -> list[str]:
    """The modules of one split, in an order by hash that is the same on every machine."""
    chosen = (name for name in names if is_heldout(digest_of(name), heldout_share) == (split == "heldout"))
    return sorted(chosen, key=digest_of)


def list_modules() -> dict[str, Path]:
    """The library's modules without the excluded ones, and their files. Raises DataError: there are none."""
    root = Path(sysconfig.get_path("stdlib"))
    modules = {}
    for name in sys.stdlib_module_names - EXCLUDED_MODULES:
        for file in (root / f"{name}.py", *(root / name).rglob("*.py")):
            parts = [part for part in file.relative_to(root).with_suffix("").parts if part != "__init__"]
            if file.is_file() and not EXCLUDED_FOLDERS.intersection(parts):
                modules[".".join(parts)] = file
    if not modules:
        what = "this interpreter has no source of its standard library"
        do = "data=text data.path=FILE_OR_FOLDER"
        raise DataError(what, where=f"Python {sys.version.split()[0]}, {root}", do=do)
    return modules


def read_module(name: str, path: Path, *, docstrings_first: bool) -> Iterator[Document]:
    """The documents of one module, lazily: docstrings and source in turn."""
    with tokenize.open(path) as file:
        source = file.read()
    docstrings, code = split_docstrings(source, name)
    kinds = [_cut(docstrings, f"{name} docstrings"), _cut(code, f"{name} source")]
    yield from interleave(kinds if docstrings_first else reversed(kinds))


@cache  # every stage reads the text, and parsing takes nine tenths of that
def split_docstrings(source: str, module: str) -> tuple[str, str]:
    """The docstrings of a source, each below its signature, and the source without docstrings."""
    lines = re.split("(?<=\n)", source)  # `splitlines` also cuts at form feeds
    described: list[str] = []
    for node in _find_definitions(ast.parse(source)):
        if docstring := ast.get_docstring(node):
            heading = module if isinstance(node, ast.Module) else f"class {node.name}"
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                heading = f"{node.name}({ast.unparse(node.args)})"
            described.append(f"{heading}\n\n{docstring}\n\n")
            first, last = node.body[0].lineno, node.body[0].end_lineno
            for number in range(first - 1, last or first):
                lines[number] = ""
    return "".join(described), "".join(lines)


def _find_definitions(node: ast.Module | Definition) -> Iterator[ast.Module | Definition]:
    """A node and the classes and functions nested in its body, in order. Searches no expressions, which is slow."""
    yield node
    for child in node.body:
        if isinstance(child, Definition):
            yield from _find_definitions(child)


def _cut(text: str, name: str) -> Iterator[Document]:
    passages = cut_passages(text.splitlines(keepends=True), DOCUMENT_CHARACTERS, 2 * DOCUMENT_CHARACTERS)
    return (Document(f"{name} {number}", passage) for number, (_, passage) in enumerate(passages, start=1))
