"""The headers of a checkpoint folder: shards, tensors, and weights stored in 4 or 8 bits."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any

from instruments.dtypes import COMPUTED, FLOATING, SAFETENSORS, dtype_name, stored_name
from instruments.errors import CheckpointError, some
from instruments.safetensors_files import TensorEntry, read_header
from models.checkpoint.mistaken import ADAPTER, explain_place, explain_shard

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

GIVE_FOLDER = "give a folder with config.json and model.safetensors"
RESTORE = "download or copy the checkpoint again"

_BARE_NAME = re.compile(r"(?!\.{1,2}\Z)[^/\\\0\ud800-\udfff]+")  # a file name without a folder, valid UTF-8
_PICKLE_PATTERNS = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
# Parsing a hostile JSON file takes forty times its bytes. The index of a model with 100,000 tensors has 10 MiB;
# compiled code parses a tokenizer's vocabulary.
MAX_JSON_BYTES = 16 * 2**20
MAX_VOCABULARY_BYTES = 40 * 2**20  # Gemma's has 33 MiB
MAX_VALUES = 2**21  # per file, lists and objects included; Gemma's merges and vocabulary are 1.8 million
VOCABULARIES = {"tokenizer.json", "vocab.json", "tekken.json"}
# Files in other formats than JSON are at most as large as a vocabulary.
TOKENIZER_PATTERNS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "*.model", "tekken.json",
    "chat_template*", "*.jinja", "additional_chat_templates/*.jinja",
)  # fmt: skip
# Settings for images, sounds and videos.
PROCESSORS = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
# The other JSON files that transformers reads of a language model. A folder may hold more, such as trainer_state.json.
CONFIGURATIONS = {
    "config.json", "generation_config.json", INDEX, ADAPTER, *PROCESSORS,
}  # fmt: skip
LICENCES = ("LICENSE*", "NOTICE*")
# What a carve copies, in addition to weights.
COPIED = ("generation_config.json", *PROCESSORS, *TOKENIZER_PATTERNS, *LICENCES)


def expand_user(path: str | Path) -> Path:
    """The path with `~` expanded; unchanged if there is no such home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def require_folder(folder: Path) -> Path:
    """Return the folder. Raises CheckpointError: it does not exist, or holds a pipe, a device or an oversized file."""
    try:
        if folder.is_dir():
            # A broken link is reported when its file is needed.
            files = [path for path in folder.iterdir() if path.exists() and not path.is_dir()]
            odd = sorted(path.name for path in files if not path.is_file())
            if not odd:
                _check_sizes(files)
                _check_links(folder)
                return folder
            what = f"{', '.join(odd[:3])}: a pipe, a socket or a device, and no file of a checkpoint"
            raise CheckpointError(what, where=str(folder), do=f"remove it, or {RESTORE}")
        if folder.is_file() and (error := explain_place(folder)):
            raise error
        found = "is a file, not a folder" if folder.exists() else "does not exist"
    except OSError as error:  # a name too long, or a folder that may not be entered
        found = f"cannot be opened ({error.strerror})"
    raise CheckpointError(f"no checkpoint: {folder} {found}", where=str(folder), do=GIVE_FOLDER)


def _check_links(folder: Path) -> None:
    """Refuse files to copy that are links to elsewhere, but for those of the hub's cache. Raises CheckpointError."""
    own = folder.resolve()
    inside = {own, own / "additional_chat_templates"}
    if own.parent.name == "snapshots":  # the repository's own files, and those that huggingface_hub 2.4 shares, by hash
        inside |= {own.parents[1] / "blobs", own.parents[1].parent / "blobs"}
    for path in (path for pattern in COPIED for path in folder.glob(pattern)):
        if path.is_symlink() and inside.isdisjoint({(place := path.resolve().parent), place.parent}):
            what = f"{path.name} is a link to a file outside of the checkpoint, and a carve would copy that"
            raise CheckpointError(what, where=str(path), do="replace the link by the file, if it belongs to the model")


def _check_sizes(files: Iterable[Path]) -> None:
    """Refuse configurations and tokenizer files that are larger than any model's. Raises CheckpointError."""
    for file in sorted(files):
        is_json, size = file.suffix == ".json", file.stat().st_size
        if file.name not in CONFIGURATIONS and not any(file.match(pattern) for pattern in TOKENIZER_PATTERNS):
            continue
        most = MAX_JSON_BYTES if is_json and file.name not in VOCABULARIES else MAX_VOCABULARY_BYTES
        what = f"{size:,} bytes, more than the {most:,}" if size > most else ""
        if is_json and MAX_VALUES < size <= most:
            content = file.read_bytes()
            if (found := sum(map(content.count, (b"[", b"{", b",")))) > MAX_VALUES:
                what = f"{found:,} values, more than the {MAX_VALUES:,}"
        if what:
            raise CheckpointError(f"{file.name} has {what} that it may have", where=str(file), do=RESTORE)


def read_json(path: Path) -> Any:  # noqa: ANN401 - anything that JSON holds
    """Parse an untrusted JSON file of a folder in which `require_folder` has found no pipe and no oversized file.

    Raises OSError: missing or unreadable; ValueError: not JSON, or nested too deeply.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name → file name of its shard; empty for a checkpoint of one file. Raises CheckpointError."""
    path = folder / INDEX
    # As in transformers, an index beside a whole file is not read.
    if (folder / SINGLE).is_file() or not path.is_file():
        return {}
    try:
        index = {str(name): str(shard) for name, shard in read_json(path)["weight_map"].items()}
        if outside := sorted(shard for shard in {*index.values()} if not _BARE_NAME.fullmatch(shard)):
            raise ValueError(f"it names files outside its folder: {', '.join(map(ascii, outside[:3]))}")
        return index
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"unreadable shard index ({type(error).__name__}: {str(error)[:200]})"
        raise CheckpointError(what, where=str(path), do="download or copy it again") from error


def list_shards(folder: Path) -> list[Path]:
    """The checkpoint's safetensors files, present or not. Raises CheckpointError."""
    if (require_folder(folder) / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return [folder / shard for shard in sorted({*_read_index(folder).values()})]
    raise missing_weights(folder, [path.name for path in folder.iterdir()])


def has_weights(folder: Path) -> bool:
    """Whether the folder holds safetensors weights, or their index."""
    return any((folder / name).is_file() for name in (SINGLE, INDEX))


def missing_weights(place: Path | str, names: Iterable[str]) -> CheckpointError:
    """The error for a place without safetensors weights; `names` are its files."""
    names = [*names]
    pickles = sorted(name for name in names if any(Path(name).match(pattern) for pattern in _PICKLE_PATTERNS))
    if not pickles:
        do = "give a safetensors checkpoint"
        if shards := sum(Path(name).match("*-of-*.safetensors") for name in names):
            do = f"copy {INDEX} from the source of these {shards} shards"
        return CheckpointError(f"no {SINGLE} or {INDEX}", where=str(place), do=do)
    return CheckpointError(
        f"pickle checkpoint refused: {', '.join(pickles)} can run any code when opened",
        where=str(place),
        do="give a safetensors checkpoint, or convert one you trust: AutoModelForCausalLM.from_pretrained(...)"
        ".save_pretrained(...)",
    )


@dataclass(frozen=True)
class PackedEntry:
    """One weight that is stored in 4 or 8 bits: its shape and number format, and its stored tensors.

    4 bits: `X.weight` packs two weights per byte, row by row. `.absmax` holds a scale per block (quantised if there is
    `.nested_absmax`), and `.quant_map` the decoded values. The JSON bytes of `.quant_state.bitsandbytes__nf4` (or fp4)
    give shape, number format and block size. 8 bits: `X.weight` is int8, `X.SCB` holds each row's largest magnitude.
    FP8: `X.weight` times its scale, one for the tensor, for each row or for each block, in `X.weight_scale_inv` (which
    is no inverse) or `X.weight_scale`, possibly as an exponent (E8M0).
    Source: bitsandbytes.functional.QuantState.as_dict and bitsandbytes.nn.Linear8bitLt;
    transformers.integrations.finegrained_fp8; compressed_tensors.compressors.
    """

    kind: str  # nf4, fp4, int8 or fp8
    dtype: str  # after dequantisation, in safetensors' spelling
    shape: tuple[int, ...]  # unpacked: (out_features, in_features)
    parts: Mapping[str, TensorEntry]  # "weight", "absmax", "quant_map" ... or "weight", "SCB", or "weight", "scale"
    block: tuple[int, int] = (0, 0)  # FP8: rows and columns that share a scale


Entry = TensorEntry | PackedEntry


def read_checkpoint(folder: Path) -> dict[str, Entry]:
    """All tensors of the checkpoint by name. Raises CheckpointError: the first of `check_shards`."""
    entries, errors = check_shards(folder)
    if errors:
        raise errors[0]
    return entries


def check_shards(folder: Path) -> tuple[dict[str, Entry], list[CheckpointError]]:
    """Read all headers: tensors by name, with packed weights as one entry if all shards are intact; and all errors."""
    try:
        shards, index = list_shards(folder), _read_index(folder)
    except CheckpointError as error:
        return {}, [error]
    stored: dict[str, TensorEntry] = {}
    errors = []
    if (folder / ADAPTER).is_file():
        what = f"{ADAPTER} beside the weights: with peft installed, transformers loads other weights than are here"
        do = "merge the adapter (merge_and_unload), save the result in another folder, and carve that"
        errors.append(CheckpointError(what, where=str(folder), do=f"{do}; or remove {ADAPTER}"))
    missing = [shard for shard in shards if not os.path.lexists(shard)]
    if len(missing) > 1:  # one error for all: an index may name any number of shards
        names = ", ".join(shard.name for shard in missing[:3]) + (" ..." if len(missing) > 3 else "")
        what = f"{len(missing):,} of {len(shards):,} shards are missing: {names}"
        errors.append(CheckpointError(what, where=str(folder), do=RESTORE))
        shards = sorted({*shards}.difference(missing))
    for shard in shards:
        try:
            stored |= read_header(shard)
        except CheckpointError as error:
            errors.append(explain_shard(shard) or error)
    wrong = sorted(name for name, shard in index.items() if name not in stored or stored[name].path.name != shard)
    if wrong and not errors:
        what = f"{len(wrong)} of {len(index)} tensors are not in the shard the index names: {', '.join(wrong[:3])}"
        errors.append(CheckpointError(what, where=str(folder / INDEX), do=RESTORE))
    if errors:
        return {**stored}, errors
    entries, errors = _join_packed(stored, folder)
    return entries, errors or [*_check_dtypes(entries, folder)]


def _check_dtypes(entries: Mapping[str, Entry], folder: Path) -> Iterator[CheckpointError]:
    """Yield an error for tensors whose header names another format than floating-point numbers."""
    wrong = [
        f"{name} is {entry.dtype} in {entry.path.name}"
        for name, entry in entries.items()
        if isinstance(entry, TensorEntry)
        and SAFETENSORS[entry.dtype][0] not in FLOATING
        and not name.endswith(".num_batches_tracked")  # torch's BatchNorm counts in int64
    ]
    if wrong:
        what = f"{len(wrong)} tensors are not stored in a format of weights (F64, F32, BF16, F16, or FP8 with scales)"
        do = f"{RESTORE}, or convert it to bfloat16 with transformers and save it"
        yield CheckpointError(what, where=f"{folder}: {some(wrong, 3)}", do=do)


_FP8, _FP8_SCALES = {"F8_E4M3", "F8_E5M2"}, ("_scale_inv", "_scale")
_POWERS = {"F8_E8M0", "U8"}  # scales that are powers of two, stored as their exponent + 127
# Tensors that belong to a packed weight, and that no decoding needs: FP8 scales of a layer's input.
_BESIDE = ("SCB", "weight_format", "activation_scale", "input_scale", "input_scale_ub")
_STATE = re.compile(r"(?P<weight>.+)\.quant_state\.bitsandbytes__(?P<kind>nf4|fp4)")


def _join_packed(entries: Mapping[str, TensorEntry], folder: Path) -> tuple[dict[str, Entry], list[CheckpointError]]:
    joined: dict[str, Entry] = dict(entries)
    errors = []
    dtype = _named_dtype(folder) if any(name.endswith(".SCB") for name in entries) else ""
    blocks = _fp8_blocks(folder) if any(entry.dtype in _FP8 for entry in entries.values()) else None
    for name in entries:
        try:
            if state := _STATE.fullmatch(name):
                weight = state["weight"]
                packed = _four_bits(entries, weight, name, state["kind"])
            elif name.endswith(".SCB"):
                weight = name.removesuffix("SCB") + "weight"
                packed = _eight_bits(entries, weight, name, dtype)
            elif entries[name].dtype in _FP8:
                weight, packed = name, _fp8(entries, name, blocks)
            else:
                continue
        except CheckpointError as error:
            errors.append(error)
            continue
        stem = weight.removesuffix("weight")
        others = (*(f"{weight}{end}" for end in _FP8_SCALES), *(f"{stem}{part}" for part in _BESIDE))
        for part in (*(f"{weight}.{key}" for key in packed.parts), *others):
            joined.pop(part, None)
        joined[weight] = packed
    alike: dict[tuple[str, str], list[str]] = {}  # such as one for each of the weights
    for wrong in errors:
        alike.setdefault((wrong.what, wrong.do), []).append(wrong.where)
    return joined, [CheckpointError(what, where=some(places, 3), do=do) for (what, do), places in alike.items()]


def _four_bits(entries: Mapping[str, TensorEntry], weight: str, state_name: str, kind: str) -> PackedEntry:
    state = _read_state(entries[state_name], weight)
    nested = f"{weight}.nested_absmax" in entries
    dtypes = {"absmax": "U8" if nested else "F32", "quant_map": "F32"}
    dtypes |= {"nested_absmax": "F32", "nested_quant_map": "F32"} if nested else {}
    parts = {"weight": _part(entries, weight, weight), state_name.removeprefix(f"{weight}."): entries[state_name]}
    parts |= {key: _part(entries, f"{weight}.{key}", weight, dtype) for key, dtype in dtypes.items()}
    shape = tuple(int(side) for side in state["shape"])
    wanted = (ceil(prod(shape) / 2), ceil(prod(shape) / int(state["blocksize"])))
    found = (parts["weight"].nbytes, prod(parts["absmax"].shape))
    if found != wanted:
        what = f"a weight of {shape} needs {wanted[0]} bytes in {wanted[1]} blocks, has {found[0]} in {found[1]}"
        raise CheckpointError(what, where=f"{parts['weight'].path}, {weight}", do=RESTORE)
    return PackedEntry(kind, stored_name(state["dtype"]), shape, parts)


def _eight_bits(entries: Mapping[str, TensorEntry], weight: str, scales: str, dtype: str) -> PackedEntry:
    entry, layout = _part(entries, weight, weight), entries.get(f"{weight}_format")
    code = 0 if layout is None else _read(layout, weight)[0]
    if entry.dtype != "I8" or entries[scales].shape != entry.shape[:1] or code:
        what = f"int8 weights are not stored row by row (format {code}, {entry.dtype} {list(entry.shape)})"
        do = "load and save the model with bitsandbytes 0.45 or later, or give the unquantised checkpoint"
        raise CheckpointError(what, where=f"{entry.path}, {weight}", do=do)
    return PackedEntry("int8", dtype, entry.shape, {"weight": entry, "SCB": _part(entries, scales, weight, "F32")})


def _fp8(entries: Mapping[str, TensorEntry], weight: str, blocks: tuple[int, int] | None) -> PackedEntry:
    entry = entries[weight]
    scales = next((entries[weight + end] for end in _FP8_SCALES if weight + end in entries), None)
    where, do = f"{entry.path}, {weight}", "give the unquantised checkpoint"
    if scales is None:
        raise CheckpointError("FP8 weight without a scale (weight_scale_inv or weight_scale)", where=where, do=do)
    block = _shared_block(entry.shape, scales.shape, blocks)
    if block is None or (SAFETENSORS[scales.dtype][0] not in COMPUTED and scales.dtype not in _POWERS):
        size = f"{blocks[0]} x {blocks[1]}" if blocks else "a size that config.json does not say"
        what = (
            f"FP8 weight of {list(entry.shape)} with scales of {list(scales.shape)} in {scales.dtype}, blocks of {size}"
        )
        raise CheckpointError(what, where=where, do=do)
    return PackedEntry("fp8", "BF16", entry.shape, {"weight": entry, "scale": scales}, block)


def _part(entries: Mapping[str, TensorEntry], name: str, weight: str, dtype: str = "") -> TensorEntry:
    if name not in entries:
        raise CheckpointError(f"quantised weight {weight} lacks {name}", do=RESTORE)
    if dtype and entries[name].dtype != dtype:
        what = f"a part of a quantised weight is {entries[name].dtype}, not {dtype}"
        raise CheckpointError(what, where=f"{entries[name].path}, {name}", do=RESTORE)
    return entries[name]


def _read_state(entry: TensorEntry, weight: str) -> dict[str, Any]:
    try:
        state = dict(json.loads(_read(entry, weight)))
        sizes = [*state["shape"], state["blocksize"]]
        sound = len(sizes) == 3 and all(type(size) is int and 1 <= size < 2**31 for size in sizes)
        if not (sound and state["dtype"] in COMPUTED):
            raise ValueError(state)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"unreadable quantisation state ({type(error).__name__}: {str(error)[:200]})"
        raise CheckpointError(what, where=f"{entry.path}, {weight}", do=RESTORE) from error
    return state


def _read(entry: TensorEntry, weight: str) -> bytes:
    with entry.path.open("rb") as file:
        file.seek(entry.offset)
        data = file.read(entry.nbytes)
    if len(data) != entry.nbytes:
        raise CheckpointError(f"{entry.path.name} was cut short while in use", where=f"{entry.path}, {weight}")
    return data


def _shared_block(
    shape: tuple[int, ...], scales: tuple[int, ...], blocks: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Rows and columns of an FP8 weight that share a scale: all, a row, or `blocks`; None: scales of another shape."""
    rows, columns = prod(shape[:-1]), prod(shape[-1:])
    if not shape or not rows * columns:
        return None
    if prod(scales) == 1:
        return rows, columns
    if scales in {(rows,), (rows, 1)}:
        return 1, columns
    fits = blocks and len(shape) == 2 and scales == (ceil(rows / blocks[0]), ceil(columns / blocks[1]))
    return blocks if fits else None


def _fp8_blocks(folder: Path) -> tuple[int, int] | None:
    """Rows and columns of a block of FP8 weights that share a scale; None: config.json does not say."""
    try:
        config = read_json(folder / "config.json")
        stored = config.get("quantization_config") or config["text_config"]["quantization_config"]
        if groups := stored.get("config_groups"):  # of compressed-tensors
            settings = [group["weights"] for group in groups.values()]
            sizes = {tuple(one.get("block_structure") or (1, one["group_size"])) for one in settings}
            ((rows, columns),) = sizes  # several would be ambiguous
        else:
            rows, columns = stored["weight_block_size"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # `read_config` reports what is no configuration at all
    return (rows, columns) if all(type(size) is int and size > 0 for size in (rows, columns)) else None


def _named_dtype(folder: Path) -> str:
    """The number format after dequantisation of int8 weights: only config.json can name it; BF16 if it does not."""
    try:
        config = read_json(folder / "config.json")
        named = dtype_name(config.get("dtype") or config.get("torch_dtype"))
    except (OSError, ValueError, AttributeError):
        # `read_config` reports it.
        return "BF16"
    return stored_name(named) if named in COMPUTED else "BF16"
