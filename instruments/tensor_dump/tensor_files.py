"""One .pt file per tensor, in the format of the Megatron tensor saver; and the functions of its interface.

    {"tensor": ..., "tensor_info": {shape, dtype, device, requires_grad, is_leaf, min, max, mean, std},
     "metadata": {layer_type, operation, quant_type, tensor_name, layer_idx, save_time, ...}}

in `{date}_{time}_{counter:04}_{layer_type}_L{layer}_{operation}_{quant_type}_{tensor_name}.pt`.
`torch.load(path, weights_only=True)` reads them.
"""

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from instruments.dtypes import dtype_name
from instruments.errors import ContractError
from instruments.files import whole_file
from instruments.tensor_dump.config import FOLDER, DumpConfig, read_control
from instruments.tensor_dump.index import STORED, Statistics, is_bare
from instruments.tensor_dump.parts import rank_and_world
from instruments.tensor_dump.reader import DumpReader
from instruments.tensor_dump.statistics import measure

_SAVED = count()


def export_pt(reader: DumpReader, folder: Path) -> int:
    """Write one file per stored tensor; returns the number of files.

    The number format in a file name is the dump's label (CUSTOM_QUANT_TYPE). Without a label, or if rounded copies are
    exported too, it is the real format.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stored = [record for record in reader.records if record.status == STORED]
    if len({record.name for record in stored}) < len(stored):
        raise ContractError("two tensors have one name", where=str(reader.folder), do="copy the whole dump again")
    rounded = {record.rounded_from for record in stored} - {None}
    for record in tqdm(stored, desc="export", unit="tensor", disable=None):
        source, time = record.source, _read_time(record.timestamp)
        label = record.quant_type if rounded or record.label is None else record.label
        info = _describe(record.statistics, record.shape, record.dtype, record.device, record.requires_grad)
        named = _facts(time, source.layer_type, source.direction, label, source.tensor, source.layer)
        more = {
            "real_quant_type": record.quant_type, "rank": record.rank, "record": record.name,
            "rounding": record.rounding and vars(record.rounding), **record.metadata,
        }  # fmt: skip
        path = folder / _file_name(time, record.counter, named)
        _write(path, reader.load(record), info, {**vars(source), **named, **more})
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
    """Write query, key and value at once; returns their paths, or None if TENSOR_SAVE_ENABLED=0. See `save_tensor`."""
    where = (layer_idx, {**(metadata or {}), **facts})
    named = {"query": query, "key": key, "value": value}
    return {name: save_tensor(one, "attention", operation, quant_type, name, *where) for name, one in named.items()}


def save_linear_tensors(
    input_tensor: Tensor,
    weight: Tensor,
    quant_type: str,
    operation: str = "forward",
    layer_idx: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    **facts: object,
) -> dict[str, str | None]:
    """Write input and weight at once; returns their paths, or None if TENSOR_SAVE_ENABLED=0. See `save_tensor`."""
    where = (layer_idx, {**(metadata or {}), **facts})
    named = {"input": input_tensor, "weight": weight}
    return {name: save_tensor(one, "linear", operation, quant_type, name, *where) for name, one in named.items()}


def save_tensor(
    tensor: Tensor,
    layer_type: str,
    operation: str,
    quant_type: str,
    tensor_name: str,
    layer_idx: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    **facts: object,
) -> str | None:
    """Write one tensor at once, into TENSOR_SAVE_DIR or ./tensor_logs; training waits for it.

    Args:
        tensor: any.
        layer_type: attention, linear ...
        operation: forward or backward.
        quant_type: a label: hifp8, mxfp8, mxfp4, bf16 or fp16.
        tensor_name: query, input, weight ...
        layer_idx: of the decoder.
        metadata: added to the file's own; only types that torch.load reads safely.
        **facts: further metadata: phase=, component= ...
    Raises:
        ConfigError: an unknown quant_type, or an invalid TENSOR_SAVE_ENABLED.
    """
    environment = {FOLDER: "tensor_logs", **os.environ}
    enabled, folder, _config = read_control(None, DumpConfig(quant_type=quant_type), environment)
    if not enabled:
        return None
    rank, world = rank_and_world()
    kept, now = tensor.detach().to("cpu", copy=True), datetime.now(UTC)
    info = _describe(measure(kept), kept.shape, tensor.dtype, str(tensor.device), tensor.requires_grad)
    named = _facts(now, layer_type, operation, quant_type, tensor_name, layer_idx)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _file_name(now, next(_SAVED) * world + rank, named)
    _write(path, kept, {**info, "is_leaf": tensor.is_leaf}, {**named, "rank": rank, **(metadata or {}), **facts})
    return str(path)


def _facts(
    time: datetime, layer_type: str, operation: str, quant_type: str, tensor_name: str, layer: int | None
) -> dict[str, Any]:
    return {
        "layer_type": layer_type, "operation": operation, "quant_type": quant_type, "tensor_name": tensor_name,
        "layer_idx": layer, "save_time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }  # fmt: skip


def _describe(
    found: Statistics | None, shape: Sequence[int], dtype: object, device: str, requires_grad: bool
) -> dict[str, Any]:
    """`tensor_info`; is_leaf is None where a dump did not record it. Statistics cover the finite values."""
    numbers = (found.minimum, found.maximum, found.mean, found.std) if found else (None,) * 4
    return {
        "shape": list(shape), "dtype": f"torch.{dtype_name(dtype)}", "device": device, "requires_grad": requires_grad,
        "is_leaf": None, **dict(zip(("min", "max", "mean", "std"), numbers, strict=True)),
    }  # fmt: skip


def _file_name(time: datetime, counter: int, facts: Mapping[str, Any]) -> str:
    layer = "none" if facts["layer_idx"] is None else facts["layer_idx"]
    kind = str(facts["layer_type"]).replace("_", "-")  # readers split names at underscores
    parts = (f"{time:%Y%m%d_%H%M%S}", f"{counter:04}", kind, f"L{layer}", facts["operation"], facts["quant_type"])
    name = "_".join(map(str, (*parts, facts["tensor_name"])))
    if not is_bare(name):
        raise ContractError(f"{name!r} is no name of a file", where="save_tensor", do="tensor_name='query'")
    return f"{name}.pt"


def _read_time(timestamp: str) -> datetime:
    try:
        return datetime.strptime(timestamp, "%Y%m%dT%H%M%S%f").replace(tzinfo=UTC)
    except ValueError as error:
        raise ContractError(f"{timestamp!r} is no time", where="index of the dump", do="dump again") from error


def _write(path: Path, tensor: Tensor, info: dict[str, Any], metadata: dict[str, Any]) -> None:
    with whole_file(path) as unfinished:
        torch.save({"tensor": tensor, "tensor_info": info, "metadata": metadata}, unfinished)
