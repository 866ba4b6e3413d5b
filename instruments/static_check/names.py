"""What a name in a file stands for: imports followed to their dotted names."""

import ast
from dataclasses import dataclass

# Where torch's parts are also reached.
_SAME = {
    "torch.nn.functional.": ("torch.functional.",),
    "torch.amp.autocast": (
        "torch.autocast", "torch.cuda.amp.autocast", "torch.cpu.amp.autocast", "torch.amp.autocast_mode.autocast",
        "torch.cuda.amp.autocast_mode.autocast",
    ),
    "torch.amp.GradScaler": (
        "torch.GradScaler", "torch.cuda.amp.GradScaler", "torch.cpu.amp.GradScaler", "torch.amp.grad_scaler.GradScaler",
    ),
}  # fmt: skip


def find_imports(tree: ast.Module) -> dict[str, str]:
    """Local name → dotted name, of every import in the file, wherever it stands."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return names


def text_of(node: ast.expr) -> str | None:
    """`a.b.c` of names and attributes; None of anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


def dotted_name(node: ast.expr, imports: dict[str, str]) -> str | None:
    """The full name of an imported thing; None of what was not imported."""
    text = text_of(node)
    if text is None:
        return None
    head, dot, rest = text.partition(".")
    if head not in imports:
        return None
    full = imports[head] + dot + rest
    for name, others in _SAME.items():
        if full in others:
            return name
    return full


def last_word(text: str | None) -> str:
    """What stands behind the last dot."""
    return (text or "").rpartition(".")[2]


FLOAT16, BFLOAT16, LOW = "float16", "bfloat16", "low"  # LOW: one of the two
_DTYPES = {"float16": FLOAT16, "half": FLOAT16, "bfloat16": BFLOAT16, "float32": "float32", "float": "float32"}
_DEFAULTS = {"cuda": FLOAT16, "cpu": BFLOAT16}


@dataclass(frozen=True)
class Region:
    """Autocast, on or off."""

    enabled: bool = True
    device: str | None = None  # None: not said in the file
    dtype: str = LOW
    certain: bool = True  # False: whoever calls the program decides whether it is on


def read_region(node: ast.expr, imports: dict[str, str]) -> Region | None:
    """The region that an expression opens; None where it is no autocast."""
    if isinstance(node, ast.IfExp):  # autocast(...) if use_amp else nullcontext()
        return read_region(node.body, imports) or read_region(node.orelse, imports)
    call = node if isinstance(node, ast.Call) else None
    callee = call.func if call else node
    full = dotted_name(callee, imports) or ""
    arguments = {word.arg: word.value for word in call.keywords} if call else {}
    first = call.args[0] if call and call.args else arguments.get("device_type")
    if full == "torch.amp.autocast":
        written = text_of(callee) or ""
        origin = imports.get(written.partition(".")[0], "") + "." + written
        device = next((kind for kind in ("cuda", "cpu") if f"{kind}.amp" in origin), None)
        enabled = arguments.get("enabled")
        if device is not None:  # torch.cuda.amp.autocast(enabled, dtype)
            enabled = first or enabled
        else:
            device = _device(first)
        return Region(_is_on(enabled), device, _dtype(arguments.get("dtype"), device, given="dtype" in arguments))
    if call and last_word(text_of(callee)) in {
        "autocast",
        "compute_loss_context_manager",
        "autocast_smart_context_manager",
    }:
        return Region(certain=False)  # of accelerate, Lightning Fabric, transformers' Trainer: mixed_precision decides
    return None


def _device(node: ast.expr | None) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.partition(":")[0]
    return None


def _is_on(node: ast.expr | None) -> bool:
    return not (isinstance(node, ast.Constant) and node.value is False)


def _dtype(node: ast.expr | None, device: str | None, *, given: bool) -> str:
    if node is None or not given:
        return _DEFAULTS.get(device or "", LOW)
    return read_dtype(node) or LOW


def read_dtype(node: ast.expr) -> str | None:
    """float16, bfloat16 or float32 from `torch.float16` and the like; None of anything else."""
    word = node.value if isinstance(node, ast.Constant) else last_word(text_of(node))
    return _DTYPES.get(word) if isinstance(word, str) else None
