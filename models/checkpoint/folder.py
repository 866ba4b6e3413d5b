"""A checkpoint folder: its shards, and which tensor lies in which."""

import json
from collections.abc import Iterable
from pathlib import Path

from instruments.errors import CheckpointError
from instruments.safetensors_header import TensorEntry, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

GIVE_FOLDER = "model.path=<folder with config.json and model.safetensors>"

_PICKLE_PATTERNS = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")


def require_folder(folder: Path) -> Path:
    """The folder itself. Raises CheckpointError: there is none."""
    if folder.is_dir():
        return folder
    found = "is a file, not a folder" if folder.exists() else "does not exist"
    raise CheckpointError(f"no checkpoint: {folder} {found}", where="model.path", do=GIVE_FOLDER)


def list_shards(folder: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint, whether or not each is there.

    Raises:
        CheckpointError: no folder, no safetensors weights, or an unreadable index.
    """
    require_folder(folder)
    if (folder / INDEX).is_file():
        return sorted({folder / shard for shard in read_index(folder).values()})
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    raise missing_weights(folder, [path.name for path in folder.iterdir()])


def read_index(folder: Path) -> dict[str, str]:
    """Tensor name → shard name, as the index says."""
    path = folder / INDEX
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(shard) for name, shard in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"unreadable shard index ({type(error).__name__}: {error})", where=str(path), do="download or copy it again"
        ) from error


def missing_weights(place: Path | str, names: Iterable[str]) -> CheckpointError:
    """Why a place without safetensors is refused; `names` are the files it does have."""
    pickles = sorted(name for name in names if any(Path(name).match(pattern) for pattern in _PICKLE_PATTERNS))
    if not pickles:
        return CheckpointError(f"no {SINGLE} or {INDEX}", where=str(place), do="give a safetensors checkpoint")
    return CheckpointError(
        f"pickle checkpoint refused: {', '.join(pickles)} can run any code when opened",
        where=str(place),
        do="give a safetensors checkpoint, or convert one you trust: AutoModelForCausalLM.from_pretrained(...)"
        ".save_pretrained(...)",
    )


def check_shards(folder: Path) -> tuple[dict[str, TensorEntry], list[CheckpointError]]:
    """Every tensor of the shards that are whole, and everything wrong with the others."""
    entries: dict[str, TensorEntry] = {}
    try:
        shards = list_shards(folder)
    except CheckpointError as error:
        return entries, [error]
    errors: list[CheckpointError] = []
    for shard in shards:
        try:
            entries |= read_header(shard)
        except CheckpointError as error:
            errors.append(error)
    if not errors and (folder / INDEX).is_file():
        errors += _index_mismatch(folder, entries)
    return entries, errors


def read_checkpoint(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of the checkpoint. Raises the first CheckpointError."""
    entries, errors = check_shards(folder)
    if errors:
        raise errors[0]
    return entries


def _index_mismatch(folder: Path, entries: dict[str, TensorEntry]) -> list[CheckpointError]:
    index = read_index(folder)
    wrong = sorted(name for name, shard in index.items() if name not in entries or entries[name].path.name != shard)
    if not wrong:
        return []
    what = f"{len(wrong)} of {len(index)} tensors are not in the shard the index names: {', '.join(wrong[:3])}"
    return [CheckpointError(what, where=str(folder / INDEX), do="download or copy the checkpoint again")]
