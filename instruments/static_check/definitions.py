"""Definitions in a file: imports, classes, functions, and the library that manages its mixed precision."""

import ast
import builtins
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from instruments.static_check.autocast import AUTOCASTS, BFLOAT16, FLOAT16, FLOAT32, called_name, last_word, text_of

Function = ast.FunctionDef | ast.AsyncFunctionDef
# Names of optimizers with float32 copies of 16-bit weights, and of weights that are not trained themselves.
_MASTERS = re.compile(
    r"(?<!is)(?<!is_)master(?!_?(?:proc|addr|port|rank|node|ip\b|host|only))|deepspeed|\bapex\b|fp16_?optim|"
    r"fp32_?(?:param|optim)|megatron|fairscale|colossalai|load_in_[48]bit|get_peft_model|kbit|bitsandbytes|"
    r"prepare_fp16|stochastic_round|kahan|mixedprecisiontrainer",
    re.IGNORECASE,
)
_SCALER_CALLS = {"scale", "unscale_"}


@dataclass(frozen=True)
class Policy:
    """Mixed precision requested from a library."""

    manager: str  # accelerate, lightning, transformers
    precision: str | None  # None: decided at run time
    node: ast.Call
    pure: bool = False  # weights in 16 bits as well


@dataclass
class Definitions:
    """Definitions of one file."""

    nodes: list[ast.AST]  # of the file, each before its parts
    spans: dict[int, tuple[int, int]]  # by id of a statement: places of its nodes
    imports: dict[str, str] = field(default_factory=dict)  # local name → dotted name
    functions: dict[str, Function] = field(default_factory=dict)  # one by name, methods as Class.name
    owners: list[tuple[Function, str | None]] = field(default_factory=list)  # all, with the class of a method
    parents: dict[int, int] = field(default_factory=dict)  # function within a function, by id of the nodes
    bases: dict[str, list[str]] = field(default_factory=dict)
    parts: dict[str, set[str]] = field(default_factory=dict)  # class → names used in its code
    called: dict[str, set[str]] = field(default_factory=dict)  # last word of an object → methods called on it
    policies: list[Policy] = field(default_factory=list)
    trains: bool = False  # calls backward or a library's trainer
    scales: bool = False  # uses a GradScaler
    has_masters: bool = False

    def within(self, statement: ast.stmt) -> list[ast.AST]:
        """All nodes of a statement."""
        first, end = self.spans[id(statement)]
        return self.nodes[first:end]

    def full_name(self, node: ast.expr) -> str:
        """Full dotted name of an imported object; empty if it was not imported."""
        head, dot, rest = text_of(node).partition(".")
        return self.imports[head] + dot + rest if head in self.imports else ""

    def called_name(self, call: ast.Call) -> str:
        """Last name of the called function in its own module: `f` for `a.f()`, and for `g()` after `import f as g`."""
        if isinstance(call.func, ast.Name):
            return self.imports.get(call.func.id, call.func.id).rpartition(".")[2]
        return called_name(call)

    def policy(self, *managers: str) -> Policy | None:
        """The first policy of these libraries."""
        return next((one for one in self.policies if one.manager in managers), None)

    def is_scaler_name(self, text: str) -> bool:
        """Whether an object has the name and the calls of a GradScaler."""
        word = last_word(text).lower()
        used = self.called.get(last_word(text), set())
        return bool(re.search(r"(?:^|_)(?:grad|amp)?_?scaler(?:_\w+)?$", word)) and bool(used & _SCALER_CALLS)

    def method(self, class_name: str, name: str) -> Function | None:
        """A method of the class or of its bases in this file."""
        places = (f"{one}.{name}" for one in self.lineage(class_name))
        return next((self.functions[place] for place in places if place in self.functions), None)

    def inherits(self, class_name: str, base: str) -> bool:
        """Whether the name of one of its bases ends with `base`."""
        return any(last_word(one).endswith(base) for one in self.lineage(class_name)[1:])

    def is_module_class(self, name: str) -> bool:
        """Whether it is a torch module class of this file."""
        return name in self.bases and (self.inherits(name, "Module") or self.inherits(name, "PreTrainedModel"))

    def classes_within(self, name: str) -> list[str]:
        """The class and the classes of this file that its code names, recursively."""
        return _reach(name, {one: sorted(parts & self.bases.keys()) for one, parts in self.parts.items()})

    def lineage(self, class_name: str) -> list[str]:
        """The class and its bases, as far as this file defines them."""
        return _reach(class_name, self.bases)


def _reach(first: str, following: Mapping[str, list[str]]) -> list[str]:
    found = [first]
    for one in found:
        found += [name for name in following.get(one, ()) if name not in found]
    return found


def find_definitions(tree: ast.Module) -> Definitions:
    """Collect the definitions of a file in one walk."""
    found = Definitions([], {})
    _number(tree, found.nodes, found.spans)
    found.imports = find_imports(found.nodes)
    words: set[str] = set()
    methods: dict[str, Function] = {}
    functions: list[Function] = []
    for node in found.nodes:
        match node:
            case ast.Name(word) | ast.keyword(str(word)) | ast.arg(word) | ast.Attribute(attr=word):
                words.add(word)
            case ast.Call():
                _note_call(node, found)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                functions.append(node)
            case ast.ClassDef():
                found.bases[node.name] = [text for base in node.bases if (text := text_of(base))]
                own = [part for part in node.body if isinstance(part, Function)]
                methods.update({f"{node.name}.{part.name}": part for part in own})
                found.owners += [(part, node.name) for part in own]
                parts = found.within(node)
                found.parts[node.name] = {getattr(part, "attr", getattr(part, "id", "")) for part in parts}
    owned = {id(method) for method, _class in found.owners}
    for function in sorted(functions, key=lambda function: function.col_offset):  # the outer ones first
        inner = found.within(function)[1:]
        found.parents.update({id(child): id(function) for child in inner if isinstance(child, Function)})
        if id(function) not in owned:
            found.functions.setdefault(function.name, function)
            found.owners.append((function, None))
    found.functions = methods | found.functions
    found.scales = any("scaler" in last_word(found.imports.get(word, word)).lower() for word in words)
    imported = {*found.imports, *found.imports.values()}
    found.has_masters = any(_MASTERS.search(word) for word in words | imported)
    return found


_LEAVES = {"ctx", "op", "ops", "id", "attr", "arg"}


def _number(node: ast.AST, nodes: list[ast.AST], spans: dict[int, tuple[int, int]]) -> None:
    first = len(nodes)
    nodes.append(node)
    for name in node._fields:
        part = None if name in _LEAVES else getattr(node, name, None)
        if isinstance(part, list):
            for inner in part:
                if isinstance(inner, ast.AST):
                    _number(inner, nodes, spans)
        elif isinstance(part, ast.AST):
            _number(part, nodes, spans)
    if isinstance(node, ast.stmt):
        spans[id(node)] = first, len(nodes)


# What these names mean where `from module import *` gives them.
_USUAL = {"torch": "torch", "nn": "torch.nn", "F": "torch.nn.functional", "np": "numpy"}
_EXPORTS = AUTOCASTS | {"lightning.Trainer", "lightning.pytorch.Trainer", "pytorch_lightning.Trainer"}


def find_imports(nodes: list[ast.AST]) -> dict[str, str]:
    """Local name → dotted name, for every import in the file.

    `from module import *` gives the functions and classes that are used and bound nowhere in the file.
    """
    names: dict[str, str] = {}
    starred: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                names[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.names[0].name == "*":
                starred.append(node.module)
                continue
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    if not starred:
        return names
    others = [module for module in starred if module.partition(".")[0] != "torch"] or starred
    for word in _find_free(nodes).difference(names):
        known = [module for module in starred if f"{module}.{word}" in _EXPORTS]
        names[word] = _USUAL.get(word, f"{(known or others)[-1]}.{word}")
    return names | {f"{module}.*": f"{module}.*" for module in starred}


def _find_free(nodes: list[ast.AST]) -> set[str]:
    """Modules, functions and classes that are used and nowhere bound, builtins aside."""
    used, bound = {*_USUAL}, {*dir(builtins)}
    for node in nodes:
        match node:
            case ast.Call(ast.Name(word)):
                used.add(word)
            case ast.Name(word, ast.Store()) | ast.arg(word) | ast.FunctionDef(word) | ast.AsyncFunctionDef(word):
                bound.add(word)
            case ast.ClassDef(word):
                bound.add(word)
                used |= {base.id for base in node.bases if isinstance(base, ast.Name)}
    return used - bound


def _note_call(node: ast.Call, found: Definitions) -> None:
    word = found.called_name(node)
    if policy := _read_policy(node, word, found):
        found.policies.append(policy)
    found.trains |= word in {"backward", "manual_backward"} or word.endswith("Trainer")
    if isinstance(node.func, ast.Attribute) and (owner := text_of(node.func.value)):
        found.called.setdefault(last_word(owner), set()).add(word)


def _read_policy(node: ast.Call, word: str, found: Definitions) -> Policy | None:
    given = {one.arg: one.value for one in node.keywords}
    known = {name: value.value for name, value in given.items() if isinstance(value, ast.Constant)}
    if word in {"Accelerator", "Fabric"}:
        asked, manager = "mixed_precision" if word == "Accelerator" else "precision", "accelerate"
    elif word == "Trainer" and "lightning" in found.full_name(node.func):
        asked, manager = "precision", "lightning"
    elif word.endswith("TrainingArguments"):
        formats = {"fp16": FLOAT16, "bf16": BFLOAT16}
        asked_for = [formats[name] for name, value in known.items() if name in formats and value is True]
        return Policy("transformers", asked_for[0] if asked_for else None, node)
    else:
        return None
    text = str(known.get(asked, "" if asked in given else "32"))
    precision = BFLOAT16 if text.startswith("bf16") else FLOAT16 if "16" in text else FLOAT32 if text else None
    return Policy(manager, precision, node, pure=text.endswith("16-true"))
