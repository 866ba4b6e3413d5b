"""One .pt file per tensor, in the format of the Megatron tensor saver; and the functions of its interface.

    {"tensor": ..., "tensor_info": {shape, dtype, device, requires_grad, is_leaf, min, max, mean, std},
     "metadata": {layer_type, operation, quant_type, tensor_name, layer_idx, save_time, ...}}

in `{date}_{time}_{counter:04}_{layer_type}_L{layer}_{operation}_{quant_type}_{tensor_name}.pt`.
`torch.load(path, weights_only=True)` reads them.
"""

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instruments.errors import ContractError, progress
from instruments.files import whole_file
from instruments.tensor_dump.config import FOLDER, DumpConfig, read_control
from instruments.tensor_dump.index import STORED, Statistics, is_bare, make_name, read_time
from instruments.tensor_dump.reader import DumpReader
from instruments.tensor_dump.recorder import rank_and_world
from instruments.tensor_dump.writer import measure

_SAVED = count()


def export_pt(reader: DumpReader, folder: Path) -> int:
    """Write one file per stored tensor; returns the number of files.

    The number format in a file name is the dump's label (CUSTOM_QUANT_TYPE), or without one the real format.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stored = [record for record in reader.records if record.status == STORED]
    if len({record.name for record in stored}) < len(stored):
        raise ContractError("two tensors have one name", where=str(reader.folder), do="copy the whole dump again")
    written: set[Path] = set()
    for record in progress(stored, "export"):
        source = record.source
        named = (source.layer_type, source.layer, source.direction, record.label or record.quant_type, source.tensor)
        info = {"device": record.device, "requires_grad": record.requires_grad, "is_leaf": record.is_leaf}
        more = {
            **vars(source), "real_quant_type": record.quant_type, "rank": record.rank, "record": record.name,
            **record.metadata,
        }  # fmt: skip
        time, tensor = read_time(record.timestamp), reader.load(record)
        file = _write(folder, time, record.counter, named, tensor, record.statistics, info, more)
        if file in written:
            what, where = f"two tensors would be one file, {file.name}", f"{reader.folder}, {record.name}"
            raise ContractError(what, where=where, do="copy the whole dump again")
        written.add(file)
    return len(stored)


def save_attention_tensors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    quant_type: str,
    operation: str = "forward",
    layer_idx: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    **facts: object,
) -> dict[str, str | None]:
    """Write query, key and value at once, into TENSOR_SAVE_DIR or ./tensor_logs; training waits for it.

    Args:
        query: any tensor; so are key and value.
        key: as given to the attention kernel.
        value: the same.
        quant_type: a label: hifp8, mxfp8, mxfp4, bf16 or fp16.
        operation: forward or backward.
        layer_idx: of the decoder.
        metadata: added to the file's own; only types that torch.load reads safely.
        **facts: further metadata: phase=, component= ...
    Returns:
        The path of each tensor's file, or None if TENSOR_SAVE_ENABLED=0.
    Raises:
        ConfigError: an unknown quant_type, or an invalid TENSOR_SAVE_ENABLED.
    """
    tensors = {"query": query, "key": key, "value": value}
    return _save(tensors, ("attention", layer_idx, operation, quant_type), {**(metadata or {}), **facts})


def save_linear_tensors(
    input_tensor: Tensor,
    weight: Tensor,
    quant_type: str,
    operation: str = "forward",
    layer_idx: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    **facts: object,
) -> dict[str, str | None]:
    """Write input and weight at once. See `save_attention_tensors`."""
    tensors = {"input": input_tensor, "weight": weight}
    return _save(tensors, ("linear", layer_idx, operation, quant_type), {**(metadata or {}), **facts})


def _save(
    tensors: Mapping[str, Tensor], named: tuple[str, int | None, str, str], more: Mapping[str, Any]
) -> dict[str, str | None]:
    """Write one file per tensor; `named`: layer type, layer, operation and label."""
    environment = {FOLDER: "tensor_logs", **os.environ}
    enabled, folder, _config = read_control(None, DumpConfig(quant_type=named[3]), environment)
    if not enabled:
        return dict.fromkeys(tensors)
    rank, world = rank_and_world()
    folder.mkdir(parents=True, exist_ok=True)
    paths: dict[str, str | None] = {}
    for name, tensor in tensors.items():
        kept, counter = tensor.detach().to("cpu", copy=True), next(_SAVED) * world + rank
        info = {"device": str(tensor.device), "requires_grad": tensor.requires_grad, "is_leaf": tensor.is_leaf}
        found, facts = measure(kept), {"rank": rank, **more}
        paths[name] = str(_write(folder, datetime.now(UTC), counter, (*named, name), kept, found, info, facts))
    return paths


def _write(
    folder: Path,
    time: datetime,
    counter: int,
    named: tuple[str, int | None, str, str, str],
    tensor: Tensor,
    found: Statistics | None,
    info: Mapping[str, Any],
    more: Mapping[str, Any],
) -> Path:
    """Write a tensor; statistics are of the finite values."""
    name = make_name(f"{time:%Y%m%d_%H%M%S}", counter, *named)
    if not is_bare(name):
        raise ContractError(f"{name!r} is no name of a file", where="save_tensor", do="tensor_name='query'")
    numbers = (found.minimum, found.maximum, found.mean, found.std) if found else (None,) * 4
    tensor_info = {
        "shape": list(tensor.shape), "dtype": str(tensor.dtype), **info,
        **dict(zip(("min", "max", "mean", "std"), numbers, strict=True)),
    }  # fmt: skip
    facts = dict(zip(("layer_type", "layer_idx", "operation", "quant_type", "tensor_name"), named, strict=True))
    metadata = {**facts, "save_time": time.strftime("%Y-%m-%d %H:%M:%S"), **more}
    with whole_file(folder / f"{name}.pt") as unfinished:
        torch.save({"tensor": tensor, "tensor_info": tensor_info, "metadata": metadata}, unfinished)
    return folder / f"{name}.pt"
