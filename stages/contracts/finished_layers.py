"""Layers that a stage is done with, kept in its scratch: a killed stage goes on after them."""

from pathlib import Path
from typing import Any, TypeVar

from models.checkpoint.durable import whole_file
from stages.contracts.tensor_file import load_contract, save_contract

Layer = TypeVar("Layer")

_VERSION = 1  # scratch belongs to one fingerprint, and with it to one version of the stage


def keep_layer(scratch: Path, index: int, layer: Any) -> None:  # noqa: ANN401 - any dataclass of tensors and plain values
    """Write what a stage found for a layer, whole or not at all."""
    with whole_file(_file(scratch, index)) as unfinished:
        save_contract(layer, unfinished, version=_VERSION)


def find_layer(scratch: Path, index: int, kind: type[Layer]) -> Layer | None:
    """What `keep_layer` wrote, or None where the layer is still to be done. Raises ContractError."""
    path = _file(scratch, index)
    return load_contract(kind, path, version=_VERSION) if path.exists() else None


def _file(scratch: Path, index: int) -> Path:
    return scratch / f"layer-{index:05}.safetensors"
