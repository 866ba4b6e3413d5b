"""The dense source model: where it lies, whether it can be carved, and what identifies it. Reads headers only."""

import hashlib
import json
from pathlib import Path
from typing import Any

from models.checkpoint.folder import (
    GIVE_FOLDER,
    INDEX,
    SINGLE,
    check_shards,
    list_shards,
    missing_weights,
    require_folder,
)
from models.checkpoint.packed import Entry, PackedEntry, join_packed
from models.config import ModelConfig
from models.errors import CheckpointError, ConfigError, UserError
from models.families.dense import check_features, check_tensors, dense_family
from models.hub import download_config, download_model, list_files, missing_from_cache, repository
from models.quantization_rules import check_placement, check_quantization, stored_quantization

EMBEDDED = Path(__file__).parent / "embedded"


def resolve_folder(model: ModelConfig) -> Path:
    """The folder of the source; downloads a hub model's safetensors, configuration and tokenizer.

    Raises:
        UserError: no place given, or the hub cannot be reached or has no such model.
    """
    return download_model(model) if model.kind == "hub" else _local_folder(model)


def read_source_config(model: ModelConfig) -> dict[str, Any]:
    """config.json of the source; of a hub model only that file is fetched. Raises UserError."""
    return read_config(download_config(model).parent if model.kind == "hub" else _local_folder(model))


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder. Raises CheckpointError."""
    path = require_folder(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"no checkpoint: cannot read config.json ({error.strerror})", where=str(folder), do=GIVE_FOLDER
        ) from error
    except ValueError as error:
        raise CheckpointError(f"config.json is no JSON: {error}", where=str(path), do="download it again") from error
    if not isinstance(config, dict):
        raise CheckpointError("config.json holds no object", where=str(path), do="download it again")
    return config


def check_source(model: ModelConfig) -> list[UserError]:
    """Everything that keeps this source from being carved, found without reading a weight."""
    try:
        config = read_source_config(model)
    except UserError as error:
        return [error]
    entries, errors = _check_weights(model)
    loading = [*check_placement(model), *check_quantization(model, config)]
    try:
        family = dense_family(config)
    except CheckpointError as error:
        return [*loading, error, *errors]
    errors = [*loading, *check_features(config, family), *errors]
    if errors or entries is None:
        return errors
    packed = [name for name, entry in entries.items() if isinstance(entry, PackedEntry)]
    if packed and not stored_quantization(config):
        return [_unsaid_quantisation(packed)]
    return [*check_tensors({name: entry.shape for name, entry in entries.items()}, config, family)]


def source_identity(model: ModelConfig) -> dict[str, Any]:
    """What changes when the source changes, for fingerprints. Raises UserError."""
    if model.kind == "hub":
        # The hub keeps each revision in a folder named by its commit.
        return {"name": model.name, "commit": download_config(model).parent.name}
    folder = _local_folder(model)
    shards = [_shard_identity(path) for path in list_shards(folder)]
    return {"config": _sha256((folder / "config.json").read_bytes()), "shards": shards}


def _shard_identity(path: Path) -> dict[str, Any]:
    status = path.stat()
    with path.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
    return {"name": path.name, "size": status.st_size, "header": _sha256(header), "mtime_ns": status.st_mtime_ns}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _check_weights(model: ModelConfig) -> tuple[dict[str, Entry] | None, list[UserError]]:
    """The tensors, where their headers are at hand, and what is wrong with the weights."""
    if model.kind != "hub":
        stored, errors = check_shards(_local_folder(model))
        if errors:
            return None, [*errors]
        entries, errors = join_packed(stored, _local_folder(model))
        return entries, [*errors]
    names = list_files(model)
    if names is None:
        # Off line, what the cache holds of the weights is checked when they are read.
        cached = any((download_config(model).parent / name).exists() for name in (SINGLE, INDEX))
        return None, [] if cached else [missing_from_cache(model, "the model's weights are")]
    return None, [] if {SINGLE, INDEX} & set(names) else [missing_weights(repository(model), names)]


def _unsaid_quantisation(packed: list[str]) -> CheckpointError:
    return CheckpointError(
        f"{len(packed)} weights are stored in 4 or 8 bits, and config.json says nothing of it",
        where=", ".join(packed[:3]) + (" ..." if len(packed) > 3 else ""),
        do="copy quantization_config from the checkpoint's own config.json",
    )


def _local_folder(model: ModelConfig) -> Path:
    if model.kind == "embedded":
        return EMBEDDED
    if model.path is None:
        raise ConfigError("model=local needs a folder", where="model.path", do="model.path=<folder of the checkpoint>")
    return Path(model.path).expanduser()
