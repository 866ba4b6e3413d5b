"""Dataclasses of tensors and plain values, possibly nested, each as one safetensors file."""

import logging
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, get_type_hints

import torch

from instruments.errors import CheckpointError, ContractError
from instruments.safetensors_files import load_tensors, save_tensors

logger = logging.getLogger(__name__)

Contract = TypeVar("Contract")


def _version(contract: Any) -> int:  # noqa: ANN401
    # A layer's result needs none: its scratch folder belongs to one fingerprint, which includes the stage's version.
    return int(getattr(contract, "VERSION", 1))


def save_contract(contract: Any, path: Path) -> None:  # noqa: ANN401 - any contract dataclass
    """Write tensor fields as tensors, other fields as JSON metadata; a nested field's name is `outer.inner`."""
    values = dict(_walk(contract))
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    plain = {name: value for name, value in values.items() if name not in tensors}
    save_tensors(path, tensors, contract=type(contract).__name__, version=_version(contract), plain=plain)


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
        tensors, facts = load_tensors(path)
    except CheckpointError as error:
        raise ContractError(f"cannot read {kind.__name__}: {error.what}", where=str(path), do=remedy) from error
    wanted = f"{kind.__name__} version {_version(kind)}"
    if (found := f"{facts.get('contract')} version {facts.get('version')}") != wanted:
        raise ContractError(f"expected {wanted}, found {found}", where=str(path), do=remedy)
    values = {**facts["plain"], **tensors}
    try:
        contract = _build(kind, values)
        odd = [*values]
    except KeyError as missing:
        odd = [*missing.args]
    if odd:
        what = f"{kind.__name__} has fields {sorted(odd)} too many or too few"
        raise ContractError(what, where=str(path), do=remedy)
    return contract


def _build(kind: type[Contract], values: dict[str, Any], prefix: str = "") -> Contract:
    """Build a dataclass, nested ones included, from the values of its fields, which are removed. Raises KeyError."""
    hints = get_type_hints(kind)
    return kind(
        **{
            spec.name: _build(hints[spec.name], values, f"{prefix}{spec.name}.")
            if is_dataclass(hints[spec.name])
            else values.pop(prefix + spec.name)
            for spec in fields(kind)  # type: ignore[arg-type]
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


def layer_file(folder: Path, layer: int) -> Path:
    """The file of one layer."""
    return folder / f"layer-{layer:05}.safetensors"


def save_layer_checkpoint(scratch: Path, index: int, layer: Any) -> None:  # noqa: ANN401 - any dataclass of tensors and plain values
    """Write a stage's result for a layer atomically."""
    save_contract(layer, layer_file(scratch, index))


def load_layer_checkpoint(scratch: Path, index: int, kind: type[Contract]) -> Contract | None:
    """Read what `save_layer_checkpoint` wrote; None if there is no file for the layer, or a damaged one.

    Raises:
        ContractError: an undamaged file of another class or version.
    """
    path = layer_file(scratch, index)
    if not path.exists():
        return None
    try:
        return load_contract(kind, path)
    except ContractError as error:
        if not isinstance(error.__cause__, CheckpointError):
            raise
        logger.warning("layer %d of an unfinished run is damaged and will be computed again: %s", index, path)
        path.unlink()
        return None
