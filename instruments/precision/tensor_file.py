"""Read tensors from an untrusted file without running code from it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError  # noqa: TID251 - only the error
from typing import Any

import torch
from torch import Tensor

from instruments.errors import DataError, UserError


def read_tensors(path: Path) -> Any:  # noqa: ANN401 - a tensor, or plain containers of them
    """Read a .pt or .safetensors file of tensors, numbers and text, in lists and dicts.

    Raises:
        DataError: the file cannot be read, or holds anything else.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file  # noqa: PLC0415 - .pt needs torch only

            from instruments.safetensors_header import read_header  # noqa: PLC0415

            read_header(path)
            return dict(load_file(path))
        # weights_only: no code from the file runs.
        return torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251
    except UserError:
        raise
    except UnpicklingError as error:
        # torch's own message advises weights_only=False, which would run code from the file.
        raise _unreadable(path, "it holds more than tensors, and opening that can run any code") from error
    except Exception as error:  # torch.load raises many kinds of errors on other files
        raise _unreadable(path, str(error).strip().partition("\n")[0][:200] or type(error).__name__) from error


def _unreadable(path: Path, reason: str) -> DataError:
    do = "give a .safetensors file, or a .pt file of tensors alone"
    return DataError(f"no tensors can be read: {reason}", where=str(path), do=do)


def flatten_tensors(held: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:  # noqa: ANN401 - of `read_tensors`
    """Tensors by path, such as "state.weight"."""
    if isinstance(held, Tensor):
        yield name or "tensor", held
    elif isinstance(held, Mapping | list | tuple):
        for key, item in held.items() if isinstance(held, Mapping) else enumerate(held):
            yield from flatten_tensors(item, f"{name}.{key}".lstrip("."))
