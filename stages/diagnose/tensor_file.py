"""Tensors from a file of the user's."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from pickle import UnpicklingError  # noqa: TID251 - only the error
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from models.errors import DataError


def read_tensors(path: Path, patterns: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of a .safetensors or .pt file whose names fit a glob.

    Raises:
        DataError: it cannot be read, or holds no such tensor.
    """
    found = _read(path)
    chosen = {name: one for name, one in found.items() if any(fnmatchcase(name, glob) for glob in patterns)}
    if not chosen:
        raise DataError(
            f"none of {len(found)} tensors is called {', '.join(patterns)}",
            where=str(path),
            do=f"diagnose.analyze_tensor.tensors=['{next(iter(found), '*')}']",
        )
    return chosen


def _read(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        # Tensors and plain containers, nothing that runs code.
        held = torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251
        return dict(_flatten(held, ""))
    except (OSError, SafetensorError, UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        do = "give a .safetensors file, or a .pt file of tensors alone"
        raise DataError(f"no tensors can be read: {reason}", where=str(path), do=do) from error


def _flatten(held: Any, name: str) -> Iterator[tuple[str, Tensor]]:  # noqa: ANN401 - whatever the file holds
    if isinstance(held, Tensor):
        yield name or "tensor", held
    elif isinstance(held, Mapping):
        for key, item in held.items():
            yield from _flatten(item, f"{name}.{key}".lstrip("."))
    elif isinstance(held, list | tuple):
        for number, item in enumerate(held):
            yield from _flatten(item, f"{name}.{number}".lstrip("."))
