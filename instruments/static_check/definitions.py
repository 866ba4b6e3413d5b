"""What a file defines: functions, classes, and what names are bound to, wherever in the file that happens."""

import ast
from dataclasses import dataclass, field
from functools import cached_property

from instruments.static_check.autocast import LOSS_MODULES, Region, dotted_name, last_word, read_region, text_of

Function = ast.FunctionDef | ast.AsyncFunctionDef
# They give back the module they are called on, or given.
_SAME_MODULE = {"to", "cuda", "cpu", "half", "bfloat16", "float", "train", "eval", "requires_grad_", "compile"}
_WRAPPERS = {"compile", "DataParallel", "DistributedDataParallel", "DDP", "FSDP", "FullyShardedDataParallel"}
_MODEL_NAMES = {
    "model", "net", "network", "unet", "vae", "encoder", "decoder", "transformer", "backbone", "generator",
    "discriminator",
}  # fmt: skip


@dataclass
class Definitions:
    """Of one file."""

    imports: dict[str, str]  # local name → dotted name
    functions: dict[str, Function] = field(default_factory=dict)  # by name, methods as Class.name
    bases: dict[str, list[str]] = field(default_factory=dict)
    made_by: dict[str, ast.Call] = field(default_factory=dict)  # text of a target → the call it was bound to
    regions: dict[str, Region] = field(default_factory=dict)
    called: dict[str, set[str]] = field(default_factory=dict)  # text of an object → methods called on it
    trains: bool = False  # backward is called somewhere
    autocasts: bool = False

    @cached_property
    def scales(self) -> bool:
        """Whether anything here is a GradScaler."""
        return any("scaler" in last_word(text).lower() for text in [*self.made_by, *self.called, *self.imports])

    def full_name(self, node: ast.expr) -> str:
        """The dotted name of an imported thing; nothing of what was not imported."""
        return dotted_name(node, self.imports)

    def updates(self, scaler: ast.expr) -> bool:
        """Whether `update` is called on a scaler of that name anywhere in the file."""
        word = last_word(text_of(scaler))
        return any(last_word(text) == word and "update" in calls for text, calls in self.called.items())

    def class_of(self, text: str) -> str | None:
        """The class in this file whose instance a name is."""
        name = text_of(self._unwrap(self.made_by[text]).func) if text in self.made_by else ""
        return name if name in self.bases else None

    def loss_of(self, node: ast.expr) -> str | None:
        """The loss that a name is a module of."""
        full = self._maker(text_of(node))
        return LOSS_MODULES.get(last_word(full)) if full.startswith("torch.nn.") else None

    def is_scaler(self, node: ast.expr) -> bool:
        """A GradScaler, by how it was made or by its name."""
        text = text_of(node)
        return self._maker(text).endswith("GradScaler") or "scaler" in last_word(text).lower()

    def is_optimizer(self, node: ast.expr) -> bool:
        """An optimizer, by how it was made or by its name."""
        text = text_of(node)
        word = last_word(text).lower()
        return self._maker(text).startswith("torch.optim.") or "optim" in word or word == "opt"

    def is_model(self, node: ast.expr) -> bool:
        """A module that could be trained, by how it was made or by its name."""
        text = text_of(node)
        calls = self.called.get(text, set())
        if not text or "requires_grad_(False)" in calls or ("eval" in calls and "train" not in calls):
            return False
        made = last_word(text_of(self._unwrap(self.made_by[text]).func)) if text in self.made_by else ""
        if made in self.bases:
            return any(last_word(base).endswith("Module") for base in self._lineage(made)[1:])
        word = last_word(text).lower()
        return made == "from_pretrained" or word in _MODEL_NAMES or word.endswith(("_model", "_net"))

    def method(self, class_name: str, name: str) -> Function | None:
        """Of the class or one of its bases in this file."""
        places = (f"{one}.{name}" for one in self._lineage(class_name))
        return next((self.functions[place] for place in places if place in self.functions), None)

    def _lineage(self, class_name: str) -> list[str]:
        """The class and what it inherits from, as far as this file says."""
        found = [class_name]
        for one in found:
            found += [base for base in self.bases.get(one, []) if base not in found]
        return found

    def _maker(self, text: str) -> str:
        """What a name was bound to a call of."""
        call = self.made_by.get(text)
        return (self.full_name(call.func) or text_of(call.func)) if call else ""

    def _unwrap(self, call: ast.Call) -> ast.Call:
        """The call that makes the module, below `.to(device)`, `torch.compile(...)` and the like."""
        for _ in range(8):  # names may be bound to each other in circles
            inner: ast.expr | None = None
            if isinstance(call.func, ast.Attribute) and call.func.attr in _SAME_MODULE:
                inner = call.func.value
            if not isinstance(inner, ast.Call) and last_word(text_of(call.func)) in _WRAPPERS and call.args:
                inner = call.args[0]
            if isinstance(inner, ast.expr) and not isinstance(inner, ast.Call):
                inner = self.made_by.get(text_of(inner))
            if not isinstance(inner, ast.Call):
                break
            call = inner
        return call


def find_definitions(tree: ast.Module) -> Definitions:
    """Everything, in one pass over the tree."""
    found = Definitions(find_imports(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.autocasts |= node.id == "autocast"
        elif isinstance(node, ast.ClassDef):
            found.bases[node.name] = [text for base in node.bases if (text := text_of(base))]
            methods = [part for part in node.body if isinstance(part, Function)]
            found.functions.update({f"{node.name}.{method.name}": method for method in methods})
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                _bind(text_of(target), node.value, found)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            _note_call(node, node.func, found)
    owned = {id(method) for name, method in found.functions.items() if "." in name}
    for node in ast.walk(tree):
        if isinstance(node, Function) and id(node) not in owned:
            found.functions.setdefault(node.name, node)
    return found


def find_imports(tree: ast.Module) -> dict[str, str]:
    """Local name → dotted name, of every import anywhere in the file."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                names[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return names


def _bind(text: str, value: ast.expr, found: Definitions) -> None:
    region = read_region(value, found.imports) if text else None
    if region is not None:
        found.regions[text] = region
    elif text and isinstance(value, ast.Call):
        # `x = x.to(device)`, `x = DDP(x)`: what x was before says more.
        inner = [value.func.value] if isinstance(value.func, ast.Attribute) else []
        if text not in {text_of(part) for part in [*inner, *value.args[:1]]}:
            found.made_by[text] = value


def _note_call(node: ast.Call, func: ast.Attribute, found: Definitions) -> None:
    found.autocasts |= "autocast" in func.attr
    found.trains |= func.attr in {"backward", "manual_backward"}
    if text := text_of(func.value):
        first = node.args[0] if node.args else None
        stops = func.attr == "requires_grad_" and isinstance(first, ast.Constant) and first.value is False
        found.called.setdefault(text, set()).add("requires_grad_(False)" if stops else func.attr)
