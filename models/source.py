"""The dense source model: where it lies, whether it can be carved, and what identifies it. Reads headers only."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from models.checkpoint.folder import INDEX, SINGLE, check_shards, list_shards, missing_weights
from models.config import ModelConfig
from models.errors import CheckpointError, ConfigError, UserError
from models.families.dense import check_features, check_tensors, dense_family

EMBEDDED = Path(__file__).parent / "embedded"

_HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.model", "merges.txt", "*.jinja", "LICENSE*", "NOTICE*"]


def resolve_folder(model: ModelConfig) -> Path:
    """The folder of the source; downloads a hub model's safetensors, configuration and tokenizer.

    Raises:
        UserError: no place given, or the hub cannot be reached or has no such model.
    """
    if model.kind != "hub":
        return _local_folder(model)
    from huggingface_hub import snapshot_download

    patterns = [*_HUB_FILES, "*.py"] if model.trust_remote_code else _HUB_FILES
    with _hub_errors(model):
        return Path(snapshot_download(_repository(model), revision=model.revision, allow_patterns=patterns))


def read_source_config(model: ModelConfig) -> dict[str, Any]:
    """config.json of the source; of a hub model only that file is fetched. Raises UserError."""
    return read_config(_hub_config(model).parent if model.kind == "hub" else _local_folder(model))


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder. Raises CheckpointError."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"no checkpoint: cannot read config.json ({error.strerror})",
            where=str(folder),
            do="model.path=<folder with config.json and model.safetensors>",
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
    try:
        family = dense_family(config)
    except CheckpointError as error:
        return [error, *_check_weights(model)]
    features = check_features(config, family)
    weights = _check_weights(model)
    if features or weights or model.kind == "hub":
        return [*features, *weights]
    entries, _none = check_shards(_local_folder(model))
    return [*check_tensors({name: entry.shape for name, entry in entries.items()}, config, family)]


def source_identity(model: ModelConfig) -> dict[str, Any]:
    """What changes when the source changes, for fingerprints. Raises UserError."""
    if model.kind == "hub":
        # The hub keeps each revision in a folder named by its commit.
        return {"name": model.name, "commit": _hub_config(model).parent.name}
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


def _check_weights(model: ModelConfig) -> list[UserError]:
    if model.kind != "hub":
        return [*check_shards(_local_folder(model))[1]]
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        names = HfApi().list_repo_files(_repository(model), revision=model.revision)
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError):
        # Off line: a download already in the cache is checked when it is resolved.
        return []
    return [] if {SINGLE, INDEX} & set(names) else [missing_weights(_repository(model), names)]


def _local_folder(model: ModelConfig) -> Path:
    if model.kind == "embedded":
        return EMBEDDED
    if model.path is None:
        raise ConfigError("model=local needs a folder", where="model.path", do="model.path=<folder of the checkpoint>")
    return Path(model.path).expanduser()


def _repository(model: ModelConfig) -> str:
    if model.name is None:
        raise ConfigError("model=hub needs a repository", where="model.name", do="model.name=Qwen/Qwen2.5-0.5B")
    return model.name


def _hub_config(model: ModelConfig) -> Path:
    from huggingface_hub import hf_hub_download

    with _hub_errors(model):
        return Path(hf_hub_download(_repository(model), "config.json", revision=model.revision))


@contextmanager
def _hub_errors(model: ModelConfig) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    where = f"model.name={model.name}, model.revision={model.revision or 'main'}"
    try:
        yield
    except (HfHubHTTPError, HFValidationError) as error:
        first = str(error).strip().splitlines()[0]
        do = "check model.name and model.revision; for a gated model: hf auth login"
        raise CheckpointError(f"the hub refused: {first}", where=where, do=do) from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            "the hub cannot be reached and the model is not in the cache",
            where=where,
            do="connect once, or model=local model.path=<folder of the checkpoint>",
        ) from error
