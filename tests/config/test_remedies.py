"""Every remedy in the source names settings, programs, options and extras that exist, with values that they accept.

Remedies are read from the source, not run, so that rare ones are checked too; those for wrong settings are run by
`tests/unit/pipeline/test_wrong_settings.py`. In notes, cards and warnings, settings with a group, programs and extras
are checked the same way.
"""

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from pipeline.help import REPOSITORY, groups
from pipeline.overrides import find_type, override_errors
from pipeline.settings import compose, register_schema
from pipeline.validate import find_fields, value_errors

PACKAGES = ("pipeline", "stages", "models", "instruments")
INSTRUMENTS = REPOSITORY / "instruments"
GROUPS = groups()
SLOTS = {"do", "remedy"}
HOLE = "\0"  # a part known only at run time
# Words before = that are not our settings: environment variables, arguments of a call, placeholders.
FOREIGN = {"HF_HUB_OFFLINE", "HF_ENDPOINT", "TORCHDYNAMO_DISABLE", "input_ids", "inputs_embeds", "key"}
PLACEHOLDER = re.compile(r"^$|[\0<%]|\.\.\.|^\[$|^[A-Z_]+$")
SETTING = re.compile(r"(?<![\w.\-/\0?&{])([A-Za-z_]\w*(?:\.[\w\0]+)*)=('[^']*'|\[[^]]*\]|[^\s,;)`]*)")
NAMED = re.compile(r"(?<![\w./\-\0])([a-z]+(?:\.[a-z_]+)+)\b(?![\w(./=])")
COMMAND = re.compile(r"python -m ([\w.]+)((?: +[\w.=\0/\[\]-]+)*)")
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
EXTRA = re.compile(r"(?:'\.|tiny-onn)\[([a-z]+)\]")


@dataclass(frozen=True)
class Text:
    """A text in the source; HOLE marks the parts known only at run time."""

    path: Path
    line: int
    text: str
    remedy: bool

    def __str__(self) -> str:
        """Its place and the text."""
        return f"{self.path.relative_to(REPOSITORY)}:{self.line}: {self.text}"


@cache
def tree_of(path: Path) -> ast.Module:
    """The parsed module."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def constants(path: Path) -> Mapping[str, ast.expr]:
    """The constants of a module by name, including those imported from our packages."""
    found: dict[str, ast.expr] = {}
    for node in tree_of(path).body:
        match node:
            case ast.Assign(targets=[ast.Name(name)], value=value) | ast.AnnAssign(target=ast.Name(name), value=value):
                found[name] = value
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                found |= {name.id: value for name, value in zip(names, values, strict=True)}
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] in PACKAGES:
                source = REPOSITORY / f"{module.replace('.', '/')}.py"
                theirs = constants(source) if source.is_file() else {}
                found |= {name.name: theirs[name.name] for name in names if name.name in theirs}
    return found


# Sub-expressions that may be the text; in a table's row, the last column is the remedy.
PARTS = {
    ast.IfExp: lambda node: (node.body, node.orelse),
    ast.BoolOp: lambda node: node.values,
    ast.Dict: lambda node: node.values,
    ast.Tuple: lambda node: node.elts[-1:],
    ast.Subscript: lambda node: (node.value,),
    ast.GeneratorExp: lambda node: (node.elt,),
    ast.Call: lambda node: {"next": node.args, "get": (getattr(node.func, "value", node), *node.args[1:])}.get(
        getattr(node.func, "id", getattr(node.func, "attr", "")), ()
    ),
}


def texts(node: ast.AST, known: Mapping[str, ast.expr], depth: int = 0) -> Iterator[str]:
    """The texts that an expression can evaluate to."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=parts):
            yield "".join(next(texts(part, known, depth), HOLE) for part in parts)
        case ast.FormattedValue(value=ast.Name(name)) if isinstance(known.get(name), ast.Constant | ast.JoinedStr):
            yield from texts(known[name], known, depth)
        case ast.FormattedValue():
            yield HOLE
        case ast.Name(name) if name in known and depth < 4:
            yield from texts(known[name], known, depth + 1)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield next(texts(left, known, depth), HOLE) + next(texts(right, known, depth), HOLE)
        case _:
            for part in PARTS.get(type(node), lambda _: ())(node):
                yield from texts(part, known, depth)


def find_slots(tree: ast.Module) -> Iterator[ast.expr]:
    """The expressions that become remedies."""
    for node in ast.walk(tree):
        match node:
            case ast.keyword(arg=str(name), value=value) if name in SLOTS:
                yield value
            case ast.Assign(targets=[ast.Name(name)], value=value) if name in SLOTS:
                yield value
            case ast.Assign(targets=[ast.Tuple(elts=[*_others, ast.Name(name)])], value=value) if name in SLOTS:
                yield value


def find_texts() -> list[Text]:
    """All remedies, then all other texts except docstrings, each once per file."""
    found: dict[tuple[Path, str], Text] = {}
    for path in (path for package in PACKAGES for path in sorted((REPOSITORY / package).rglob("*.py"))):
        tree, known = tree_of(path), constants(path)
        for slot in find_slots(tree):
            for text in texts(slot, known):
                found.setdefault((path, text), Text(path, slot.lineno, text, remedy=True))
        passed = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        passed |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in passed:
                for text in texts(node, known):
                    found.setdefault((path, text), Text(path, node.lineno, text, remedy=False))
    return list(found.values())


@cache
def parameters() -> frozenset[str]:
    """Names of all arguments and fields of the instruments, which users call from their own programs."""
    names = set()
    for path in INSTRUMENTS.rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            match node:
                case ast.arg(arg=name) | ast.AnnAssign(target=ast.Name(name)):
                    names.add(name)
    return frozenset(names)


def find_setting_faults(text: Text) -> Iterator[str]:
    """Settings that do not exist or do not accept the value."""
    for key, value in SETTING.findall(text.text):
        group, dot, _name = key.partition(".")
        if not (text.remedy or (dot and group in GROUPS)) or key in FOREIGN or key.isupper():
            continue
        if HOLE in key:
            if not any(re.fullmatch(key.replace(HOLE, r"\w+"), name) for name in [*specs(), "data.sources.0.share"]):
                yield f"there is no setting {key}"
        elif key not in GROUPS and find_type(key) is None:
            if not text.path.is_relative_to(INSTRUMENTS) or key not in parameters():
                yield f"there is no setting {key}"
        elif not PLACEHOLDER.search(value := value.rstrip(".:")):
            yield from find_value_faults(key, value)
    for key in NAMED.findall(text.text) if text.remedy else ():
        is_file = key.endswith((".py", ".safetensors", ".json"))
        if key.partition(".")[0] in GROUPS and find_type(key) is None and not is_file:
            yield f"there is no setting {key}"


@cache
def find_value_faults(key: str, value: str) -> list[str]:
    """Errors of the command line and of the setting's rules for this value."""
    faults = override_errors([f"{key}={value}"], sweep=False)
    if faults or key not in specs():
        return [error.what for errors in faults.values() for error in errors]
    given = OverridesParser.create().parse_override(f"{key}={value}").value()
    items = given if isinstance(given, list) else [] if given is None else [given]
    return [error.what for item in items for error in value_errors(key, item, specs()[key])]


@cache
def specs() -> Mapping[str, object]:
    """The field of every setting by name."""
    register_schema()
    return {name: spec for name, _value, spec in find_fields(compose([])[0])}


def find_command_faults(text: Text) -> Iterator[str]:
    """Programs, subcommands, options and extras that do not exist."""
    sources = [text.path]
    for module, rest in COMMAND.findall(text.text):
        if module.partition(".")[0] not in PACKAGES:
            continue
        if find_spec(module) is None:
            yield f"there is no program {module}"
            continue
        sources = program_files(module)
        source = read(*sources)
        words = [word for word in rest.split() if "=" not in word]
        if "add_parser" in source and words and re.fullmatch("[a-z]+", words[0]) and f'"{words[0]}"' not in source:
            yield f"{module} knows no {words[0]}"
    if text.remedy:
        for option in OPTION.findall(text.text):
            if option not in FLAGS and not re.search(rf"[\"' ]{option}[\"' =]", read(*sources)):
                yield f"there is no option {option}"
    yield from (f"there is no extra {extra}" for extra in EXTRA.findall(text.text) if extra not in list_extras())


@cache
def list_extras() -> list[str]:
    """The extras that can be installed."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["optional-dependencies"]]


@cache
def read(*paths: Path) -> str:
    """The texts of the files, concatenated."""
    return "".join(path.read_text(encoding="utf-8") for path in paths)


# Options of Hydra, torchrun and argparse.
FLAGS = {"--cfg", "--resolve", "--nproc-per-node", "--help"}


def program_files(module: str) -> list[Path]:
    """Files that define a program's command line."""
    path = Path(find_spec(module).origin)
    command = {"pipeline.dump": "tensor_dump", "pipeline.mscan": "mscan", "pipeline.auto_diff": "precision"}.get(module)
    return [path, *([INSTRUMENTS / command / "command.py"] if command else [])]


TEXTS = find_texts()


def test_there_are_remedies():
    assert sum(text.remedy for text in TEXTS) > 250


@pytest.mark.parametrize("find_faults", [find_setting_faults, find_command_faults])
def test_what_texts_name_is_there(find_faults):
    assert [f"{fault} | {text}" for text in TEXTS for fault in find_faults(text)] == []


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("data.tokns=5", ["there is no setting data.tokns"]),
        ("data.tokens=many, or data.labels=none", 2),
        ("assemble.router_steps=99999999", 1),
        ("lower train.microbatch or train.batch", ["there is no setting train.microbatch"]),
        ("store=locale", 1),
        ("python -m pipeline.stores export", ["there is no program pipeline.stores"]),
        ("python -m pipeline.store exports", ["pipeline.store knows no exports"]),
        ("python -m pipeline.gguf A --kind q8_0", ["there is no option --kind"]),
        ("pip install -e '.[rediss]'", ["there is no extra rediss"]),
    ],
)
def test_a_remedy_that_would_not_work_is_found(text, faults):
    remedy = Text(REPOSITORY / "pipeline/run.py", 1, text, remedy=True)
    found = [fault for find in (find_setting_faults, find_command_faults) for fault in find(remedy)]
    assert found == faults if isinstance(faults, list) else len(found) == faults
