"""A checkpoint folder by its headers: its shards, its tensors, and weights stored in 4 or 8 bits."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from errno import EINVAL
from math import ceil, prod
from pathlib import Path
from stat import S_ISREG
from typing import Any

from instruments.errors import CheckpointError
from instruments.safetensors_header import TensorEntry, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

GIVE_FOLDER = "model.path=<folder with config.json and model.safetensors>"

_PICKLE_PATTERNS = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")


def require_folder(folder: Path) -> Path:
    """The folder itself. Raises CheckpointError: there is none, or a reader would wait for a file in it for ever."""
    try:
        if folder.is_dir():
            _check_regular(folder)
            return folder
        found = "is a file, not a folder" if folder.exists() else "does not exist"
    except OSError as error:  # a name too long, or a folder that may not be entered
        found = f"cannot be opened ({error.strerror})"
    raise CheckpointError(f"no checkpoint: {folder} {found}", where="model.path", do=GIVE_FOLDER)


def _check_regular(folder: Path) -> None:
    """Refuse pipes, sockets and devices, links to them included."""
    with os.scandir(folder) as entries:
        odd = sorted(entry.name for entry in entries if not (entry.is_file() or entry.is_dir() or _is_dangling(entry)))
    if odd:
        raise CheckpointError(
            f"{', '.join(odd[:3])}: a pipe, a socket or a device, and no file of a checkpoint",
            where=str(folder),
            do="remove it, or download or copy the checkpoint again",
        )


def _is_dangling(entry: os.DirEntry[str]) -> bool:
    return entry.is_symlink() and not Path(entry.path).exists()


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


MAX_JSON_BYTES = 64 * 2**20  # the index of a model of 100,000 tensors has a tenth of it


def read_json(path: Path) -> Any:  # noqa: ANN401 - whatever the file holds
    """The JSON in a checkpoint's file, which is untrusted.

    Raises:
        OSError: not there, not readable, or no regular file.
        ValueError: no JSON, nested too deeply, or too large for what it is for.
    """
    status = path.stat()
    if not S_ISREG(status.st_mode):
        raise OSError(EINVAL, "it is no regular file")
    if status.st_size > MAX_JSON_BYTES:
        raise ValueError(f"{status.st_size:,} bytes are too many")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_index(folder: Path) -> dict[str, str]:
    """Tensor name → shard name in the index, a bare name of a file in the same folder."""
    path = folder / INDEX
    try:
        weight_map = read_json(path)["weight_map"]
        index = {str(name): str(shard) for name, shard in weight_map.items()}
        if outside := sorted({shard for shard in index.values() if not is_bare_name(shard)}):
            raise ValueError(f"it names files outside its folder: {', '.join(map(ascii, outside[:3]))}")
        return index
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"unreadable shard index ({type(error).__name__}: {str(error)[:200]})",
            where=str(path),
            do="download or copy it again",
        ) from error


def is_bare_name(name: str) -> bool:
    """Whether this names a file in the folder itself."""
    return name not in {"", ".", ".."} and not set(name) & {"/", "\\", "\0"}


def missing_weights(place: Path | str, names: Iterable[str]) -> CheckpointError:
    """The error for a place without safetensors weights; `names` are its files."""
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
    """Every tensor of the intact shards, and the errors of the others."""
    entries: dict[str, TensorEntry] = {}
    try:
        shards = list_shards(folder)
    except CheckpointError as error:
        return entries, [error]
    missing = [shard for shard in shards if not os.path.lexists(shard)]
    errors = [_missing_shards(folder, missing, len(shards))] if len(missing) > 1 else []
    for shard in shards if not errors else sorted({*shards} - {*missing}):
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


def _missing_shards(folder: Path, missing: list[Path], total: int) -> CheckpointError:
    """One error for all of them: an index may name any number."""
    names = ", ".join(path.name for path in missing[:3]) + (" ..." if len(missing) > 3 else "")
    what = f"{len(missing):,} of {total:,} shards are missing: {names}"
    return CheckpointError(what, where=str(folder), do="download or copy the checkpoint again")


def _index_mismatch(folder: Path, entries: dict[str, TensorEntry]) -> list[CheckpointError]:
    index = read_index(folder)
    wrong = sorted(name for name, shard in index.items() if name not in entries or entries[name].path.name != shard)
    if not wrong:
        return []
    what = f"{len(wrong)} of {len(index)} tensors are not in the shard the index names: {', '.join(wrong[:3])}"
    return [CheckpointError(what, where=str(folder / INDEX), do="download or copy the checkpoint again")]


_STATE = re.compile(r"(?P<weight>.+)\.(?P<key>quant_state\.bitsandbytes__(?P<kind>nf4|fp4))")
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_RESTORE = "download or copy the checkpoint again"
_NESTED = ("nested_absmax", "nested_quant_map")


@dataclass(frozen=True)
class PackedEntry:
    """One weight that bitsandbytes stored in 4 or 8 bits: as the model sees it, and the tensors it is stored in.

    4 bits: `X.weight` holds two weights a byte, row by row, in blocks with a scale each (`.absmax`, itself quantised
    where there is `.nested_absmax`), decoded by `.quant_map`; the JSON bytes of `.quant_state.bitsandbytes__nf4` (or
    fp4) give shape, number format and block size. 8 bits: `X.weight` is int8 and `X.SCB` holds the largest magnitude of
    each row. Source: bitsandbytes.functional.QuantState.as_dict and bitsandbytes.nn.Linear8bitLt.
    """

    kind: str  # nf4, fp4 or int8
    dtype: str  # of the weight once dequantised, as safetensors spells it
    shape: tuple[int, ...]  # true shape, (out_features, in_features)
    parts: Mapping[str, TensorEntry]  # "weight", "absmax", "quant_map" ... or "weight", "SCB"


Entry = TensorEntry | PackedEntry


def join_packed(entries: Mapping[str, TensorEntry], folder: Path) -> tuple[dict[str, Entry], list[CheckpointError]]:
    """Every tensor of a checkpoint folder as the model sees it, and an error for every incomplete packed weight.

    Reads no more than the few bytes of JSON that go with each 4-bit weight.
    """
    joined: dict[str, Entry] = dict(entries)
    errors, dtype = [], _named_dtype(folder)
    for name in entries:
        try:
            if state := _STATE.fullmatch(name):
                _replace(joined, state["weight"], _four_bits(entries, state["weight"], state["key"], state["kind"]))
            elif name.endswith(".SCB"):
                weight = name.removesuffix("SCB") + "weight"
                _replace(joined, weight, _eight_bits(entries, weight, dtype))
        except CheckpointError as error:
            errors.append(error)
    return joined, errors


def _replace(joined: dict[str, Entry], weight: str, packed: PackedEntry) -> None:
    stem = weight.removesuffix("weight")
    for key in packed.parts:
        joined.pop(f"{weight}.{key}", None)
    for key in ("SCB", "weight_format"):
        joined.pop(f"{stem}{key}", None)
    joined[weight] = packed


def _four_bits(entries: Mapping[str, TensorEntry], weight: str, key: str, kind: str) -> PackedEntry:
    state = _read_state(entries[f"{weight}.{key}"], weight)
    keys = ["absmax", "quant_map", *(_NESTED if f"{weight}.{_NESTED[0]}" in entries else ())]
    parts = {"weight": _part(entries, weight, weight), key: entries[f"{weight}.{key}"]}
    parts |= {name: _part(entries, f"{weight}.{name}", weight) for name in keys}
    shape = tuple(int(side) for side in state["shape"])
    size, blocks = prod(shape), ceil(prod(shape) / int(state["blocksize"]))
    found = (parts["weight"].nbytes, prod(parts["absmax"].shape))
    if found != (ceil(size / 2), blocks):
        raise CheckpointError(
            f"a weight of {shape} needs {ceil(size / 2)} bytes in {blocks} blocks, has {found[0]} in {found[1]}",
            where=f"{parts['weight'].path}, {weight}",
            do=_RESTORE,
        )
    return PackedEntry(kind, _DTYPES[state["dtype"]], shape, parts)


def _eight_bits(entries: Mapping[str, TensorEntry], weight: str, dtype: str) -> PackedEntry:
    stem = weight.removesuffix("weight")
    parts = {"weight": _part(entries, weight, weight), "SCB": entries[f"{stem}SCB"]}
    layout = entries.get(f"{stem}weight_format")
    code = 0 if layout is None else _read(layout, weight)[0]
    entry = parts["weight"]
    if entry.dtype != "I8" or parts["SCB"].shape != entry.shape[:1] or code:
        raise CheckpointError(
            f"int8 weights are not stored row by row (format {code}, {entry.dtype} {list(entry.shape)})",
            where=f"{entry.path}, {weight}",
            do="load and save the model with bitsandbytes 0.45 or later, or give the unquantised checkpoint",
        )
    return PackedEntry("int8", dtype, entry.shape, parts)


def _part(entries: Mapping[str, TensorEntry], name: str, weight: str) -> TensorEntry:
    if name not in entries:
        raise CheckpointError(f"quantised weight {weight} lacks {name}", do=_RESTORE)
    return entries[name]


def _read_state(entry: TensorEntry, weight: str) -> dict[str, Any]:
    try:
        state = dict(json.loads(_read(entry, weight)))
        sizes = [*state["shape"], state["blocksize"]]
        sound = len(sizes) == 3 and all(type(size) is int and 1 <= size < 2**31 for size in sizes)
        if not (sound and isinstance(state["dtype"], str) and state["dtype"] in _DTYPES):
            raise ValueError(state)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"unreadable quantisation state ({type(error).__name__}: {str(error)[:200]})",
            where=f"{entry.path}, {weight}",
            do=_RESTORE,
        ) from error
    return state


def _read(entry: TensorEntry, weight: str) -> bytes:
    with entry.path.open("rb") as file:
        file.seek(entry.offset)
        data = file.read(entry.nbytes)
    if len(data) != entry.nbytes:
        raise CheckpointError(f"{entry.path.name} was cut short while in use", where=f"{entry.path}, {weight}")
    return data


def _named_dtype(folder: Path) -> str:
    """The number format to dequantise int8 weights to: config.json may name it, their file does not."""
    try:
        config = read_json(folder / "config.json")
        named = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    except (OSError, ValueError, AttributeError):
        # `read_config` reports it.
        return "BF16"
    return _DTYPES.get(named, "BF16")
