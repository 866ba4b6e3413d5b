"""Dataclasses of tensors and plain values, possibly nested, each as one safetensors file."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from instruments.durable import hash_file, sync, whole_file
from instruments.errors import ContractError
from instruments.safetensors_header import pack_tag, unpack_tag

logger = logging.getLogger(__name__)

Contract = TypeVar("Contract")


def _version(contract: Any) -> int:  # noqa: ANN401
    # A layer's result needs none: its scratch folder belongs to one fingerprint, which includes the stage's version.
    return int(getattr(contract, "VERSION", 1))


def save_contract(contract: Any, path: Path) -> None:  # noqa: ANN401 - any contract dataclass
    """Write tensor fields as tensors, other fields as JSON metadata; a nested field's name is `outer.inner`."""
    values = dict(_walk(contract))
    tensors = {name: value.contiguous() for name, value in values.items() if isinstance(value, torch.Tensor)}
    plain = {name: value for name, value in values.items() if name not in tensors}
    tag = pack_tag(contract=type(contract).__name__, version=_version(contract), plain=plain)
    save_file(tensors, path, metadata=tag)


def _walk(contract: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    for spec in fields(contract):
        value = getattr(contract, spec.name)
        if is_dataclass(value):
            yield from _walk(value, f"{prefix}{spec.name}.")
        else:
            yield prefix + spec.name, value


def load_contract(kind: type[Contract], path: Path) -> Contract:
    """Read what `save_contract` wrote.

    Raises:
        ContractError: the file is missing, unreadable, of another class or version, or has other fields.
    """
    remedy = "run the stage that writes it again, with fresh=true"
    try:
        with safe_open(path, framework="pt") as file:
            tag = unpack_tag(file.metadata())
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no dict
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise ContractError(f"cannot read {kind.__name__}: {error}", where=str(path), do=remedy) from error
    wanted, found = f"{kind.__name__} version {_version(kind)}", f"{tag.get('contract')} version {tag.get('version')}"
    if found != wanted:
        raise ContractError(f"expected {wanted}, found {found}", where=str(path), do=remedy)
    values = {**tag["plain"], **tensors}
    names = set(_names(kind))
    if values.keys() != names:
        what = f"{kind.__name__} has fields {sorted(values.keys() ^ names)} too many or too few"
        raise ContractError(what, where=str(path), do=remedy)
    return _build(kind, values)


def _parts(kind: type) -> dict[str, type | None]:
    """Field name → its dataclass, or None if its type is no dataclass."""
    hints = get_type_hints(kind)
    parts = ((spec.name, hints[spec.name]) for spec in fields(kind))
    return {name: hint if is_dataclass(hint) else None for name, hint in parts}  # type: ignore[misc]


def _names(kind: type, prefix: str = "") -> Iterator[str]:
    for name, part in _parts(kind).items():
        if part is None:
            yield prefix + name
        else:
            yield from _names(part, f"{prefix}{name}.")


def _build(kind: type[Contract], values: Mapping[str, Any], prefix: str = "") -> Contract:
    return kind(
        **{
            name: values[prefix + name] if part is None else _build(part, values, f"{prefix}{name}.")
            for name, part in _parts(kind).items()
        }
    )


class TensorFile:
    """Base of dataclasses that are stored as one file in the folder of a stage."""

    VERSION: ClassVar[int]
    FILE: ClassVar[str]

    def save(self, folder: Path) -> None:
        """Write `folder/FILE`."""
        save_contract(self, folder / self.FILE)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read what `save` wrote. Raises ContractError."""
        return load_contract(cls, folder / cls.FILE)


def save_layer_checkpoint(scratch: Path, index: int, layer: Any) -> None:  # noqa: ANN401 - any dataclass of tensors and plain values
    """Write a stage's result for a layer atomically; the hash of the file is part of its name."""
    written = scratch / f"layer-{index:05}"
    with whole_file(written) as unfinished:
        save_contract(layer, unfinished)
    for older in _find_files(scratch, index):
        older.unlink()
    written.rename(scratch / f"{written.name}.{hash_file(written)}.safetensors")
    sync(scratch)


def load_layer_checkpoint(scratch: Path, index: int, kind: type[Contract]) -> Contract | None:
    """Read what `save_layer_checkpoint` wrote; None if there is no file for the layer, or a damaged one.

    Raises:
        ContractError: an undamaged file of another class or version.
    """
    for path in _find_files(scratch, index):
        if hash_file(path) == path.suffixes[0].removeprefix("."):
            return load_contract(kind, path)
        logger.warning("layer %d of an unfinished run is damaged and will be computed again: %s", index, path)
        path.unlink()
    return None


def _find_files(scratch: Path, index: int) -> list[Path]:
    return sorted(scratch.glob(f"layer-{index:05}.*safetensors"))
