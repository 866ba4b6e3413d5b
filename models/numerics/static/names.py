"""What a name in a file stands for: imports followed to their dotted names."""

import ast

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
