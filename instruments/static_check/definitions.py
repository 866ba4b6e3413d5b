"""What a file defines: functions, classes, and what names are bound to, wherever in the file that happens."""

import ast
from dataclasses import dataclass, field

from instruments.static_check.names import Region, dotted_name, find_imports, last_word, read_region, text_of
from instruments.static_check.operations import LOSS_MODULES

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

    imports: dict[str, str]
    functions: dict[str, Function] = field(default_factory=dict)  # by name, methods as Class.name
    bases: dict[str, list[str]] = field(default_factory=dict)
    made_by: dict[str, ast.Call] = field(default_factory=dict)  # text of a target → the call it was bound to
    regions: dict[str, Region] = field(default_factory=dict)
    called: dict[str, set[str]] = field(default_factory=dict)  # text of an object → methods called on it
    trains: bool = False  # backward is called somewhere
    autocasts: bool = False

    @property
    def scales(self) -> bool:
        """Whether anything here is a GradScaler."""
        return any("scaler" in last_word(text).lower() for text in [*self.made_by, *self.called, *self.imports])

    @property
    def mixes_precision(self) -> bool:
        """Whether autocast or a GradScaler is at work."""
        return self.scales or self.autocasts

    def updates(self, scaler: ast.expr) -> bool:
        """Whether `update` is called on a scaler of that name anywhere in the file."""
        word = last_word(text_of(scaler))
        return any(last_word(text) == word and "update" in calls for text, calls in self.called.items())

    def class_of(self, text: str) -> str | None:
        """The class in this file whose instance a name is."""
        call = self.made_by.get(text)
        name = text_of(_unwrap(call, self).func) if call else None
        return name if name in self.bases else None

    def loss_of(self, text: str) -> str | None:
        """The loss that a name is a module of."""
        call = self.made_by.get(text)
        full = dotted_name(call.func, self.imports) or "" if call else ""
        return LOSS_MODULES.get(last_word(full)) if full.startswith("torch.nn.") else None

    def is_scaler(self, node: ast.expr) -> bool:
        """A GradScaler, by how it was made or by its name."""
        text = text_of(node)
        if text is None:
            return False
        call = self.made_by.get(text)
        made = (dotted_name(call.func, self.imports) or text_of(call.func) or "") if call else ""
        return made.endswith("GradScaler") or "scaler" in last_word(text).lower()

    def is_optimizer(self, node: ast.expr) -> bool:
        """An optimizer, by how it was made or by its name."""
        text = text_of(node) or ""
        call = self.made_by.get(text)
        made = (dotted_name(call.func, self.imports) or "") if call else ""
        word = last_word(text).lower()
        return made.startswith("torch.optim.") or "optim" in word or word == "opt"

    def is_model(self, node: ast.expr) -> bool:
        """A module that could be trained, by how it was made or by its name."""
        text = text_of(node)
        if text is None or self._is_frozen(text):
            return False
        call = self.made_by.get(text)
        made = last_word(text_of(_unwrap(call, self).func)) if call else ""
        if made in self.bases:
            return self.is_module(made)
        word = last_word(text).lower()
        return made == "from_pretrained" or word in _MODEL_NAMES or word.endswith(("_model", "_net"))

    def _is_frozen(self, text: str) -> bool:
        calls = self.called.get(text, set())
        return "requires_grad_(False)" in calls or ("eval" in calls and "train" not in calls)

    def is_module(self, name: str) -> bool:
        """Whether a class of this file is an nn.Module."""
        return any(
            last_word(base).endswith("Module") or self.is_module(base)
            for base in self.bases.get(name, [])
            if base != name
        )

    def method(self, class_name: str, name: str) -> Function | None:
        """Of the class or one of its bases in this file."""
        seen: set[str] = set()
        waiting = [class_name]
        while waiting:
            one = waiting.pop(0)
            if one in seen:
                continue
            seen.add(one)
            if f"{one}.{name}" in self.functions:
                return self.functions[f"{one}.{name}"]
            waiting += self.bases.get(one, [])
        return None


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
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            _bind(node, found)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found.autocasts |= "autocast" in node.func.attr
            _note_call(node, node.func, found)
    owned = {id(method) for name, method in found.functions.items() if "." in name}
    for node in ast.walk(tree):
        if isinstance(node, Function) and id(node) not in owned:
            found.functions.setdefault(node.name, node)
    return found


def _bind(node: ast.Assign | ast.AnnAssign | ast.NamedExpr, found: Definitions) -> None:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in targets:
        text = text_of(target)
        if text is None or node.value is None:
            continue
        region = read_region(node.value, found.imports)
        if region is not None:
            found.regions[text] = region
        elif isinstance(node.value, ast.Call) and not _wraps(node.value, text):
            found.made_by[text] = node.value


def _note_call(node: ast.Call, func: ast.Attribute, found: Definitions) -> None:
    found.trains |= func.attr in {"backward", "manual_backward"}
    text = text_of(func.value)
    if text is not None:
        first = node.args[0] if node.args else None
        stops = func.attr == "requires_grad_" and isinstance(first, ast.Constant) and first.value is False
        found.called.setdefault(text, set()).add("requires_grad_(False)" if stops else func.attr)


def _wraps(call: ast.Call, text: str) -> bool:
    """`x = x.to(device)`, `x = DDP(x)`: what x was before says more."""
    inner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return text in {text_of(part) for part in [inner, *call.args[:1]] if part is not None}


def _unwrap(call: ast.Call, found: Definitions) -> ast.Call:
    """The call that makes the module, below `.to(device)`, `torch.compile(...)` and the like."""
    for _ in range(8):  # names may be bound to each other in circles
        inner: ast.expr | None = None
        if isinstance(call.func, ast.Attribute) and call.func.attr in _SAME_MODULE:
            inner = call.func.value
        if not isinstance(inner, ast.Call) and last_word(text_of(call.func)) in _WRAPPERS and call.args:
            inner = call.args[0]
        if isinstance(inner, ast.expr) and not isinstance(inner, ast.Call):
            inner = found.made_by.get(text_of(inner) or "")
        if not isinstance(inner, ast.Call):
            break
        call = inner
    return call
