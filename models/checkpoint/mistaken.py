"""Well-known folders and files that are no checkpoint of a model, and what to do with them."""

import re
from collections.abc import Iterable
from pathlib import Path

from instruments.errors import CheckpointError

ADAPTER = "adapter_config.json"
# First characters of tensors' names that a program put before the model's own → who did, and the remedy.
_PREFIXES = {
    "_orig_mod.": ("torch.compile", "save model._orig_mod"),
    "module.": ("DataParallel or DDP", "save model.module"),
    "base_model.model.": ("peft", "save model.merge_and_unload()"),
    "_fsdp_wrapped_module.": ("FSDP", "save the full state of the model"),
}
_POINTER = b"version https://git-lfs"


def explain_place(place: Path) -> CheckpointError | None:
    """The error for a place without config.json that is something well known; None: it is not."""
    names = sorted(entry.name for entry in place.iterdir()) if place.is_dir() else [place.name]
    folder = place if place.is_dir() else place.parent
    if ggufs := [name for name in names if name.lower().endswith(".gguf")]:
        what = f"{ggufs[0]} is quantised for llama.cpp, and no checkpoint of transformers"
        load = f'AutoModelForCausalLM.from_pretrained("{folder}", gguf_file="{ggufs[0]}").save_pretrained("NEW_FOLDER")'
        return CheckpointError(what, where=str(place), do=f"the model's own checkpoint, or in Python {load}")
    if ADAPTER in names:
        what = "the folder holds an adapter (LoRA), and not the model that it changes"
        do = "merge it into its model and save that: model.merge_and_unload().save_pretrained(NEW_FOLDER)"
        return CheckpointError(what, where=str(place), do=do)
    inner = [*place.glob("snapshots/*/config.json")] or [*place.glob("checkpoint-*/config.json")]
    if inner:
        last = max(inner, key=lambda config: (_number(config.parent.name), config.stat().st_mtime)).parent
        what = "the folder holds several states of a model, and is none itself"
        return CheckpointError(what, where=str(place), do=f"model={last}")
    return None


def explain_shard(shard: Path) -> CheckpointError | None:
    """The error for a file that only points to the weights; None: it does not."""
    try:
        with shard.open("rb") as file:
            if file.read(len(_POINTER)) != _POINTER:
                return None
    except OSError:  # it has an error of its own
        return None
    what = f"{shard.name} is a pointer of Git LFS, and not the weights"
    return CheckpointError(what, where=str(shard), do=f"git lfs pull in {shard.parent}")


def explain_names(names: Iterable[str]) -> CheckpointError | None:
    """The error for tensors whose names all begin with what another program put there; None: they do not."""
    names = list(names)
    for prefix, (program, do) in _PREFIXES.items():
        if names and all(name.startswith(prefix) for name in names):
            what = f"the tensors are named as in {program}: all begin with {prefix}"
            return CheckpointError(what, where=names[0], do=f"{do}, with save_pretrained, and carve that")
    return None


def _number(name: str) -> int:
    return int(found[0]) if (found := re.findall(r"\d+$", name)) and name.startswith("checkpoint-") else 0
