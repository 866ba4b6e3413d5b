"""The dense source model: its folder, its config.json, its cache key, and whether the hub answers; loads no weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any

from huggingface_hub import constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, LocalEntryNotFoundError
from huggingface_hub.utils import get_session

from instruments.errors import CheckpointError, ConfigError, first_line
from instruments.files import hash_file
from models.checkpoint import folder as checkpoint
from models.checkpoint.mistaken import explain_place
from models.config import ModelConfig

# Not every *.safetensors: some repositories hold a second copy of the weights under another name.
_FILES = ["model*.safetensors", "*.json", *checkpoint.TOKENIZER_PATTERNS, *checkpoint.LICENCES]

# Files that affect the result, apart from the weights; generation_config.json is copied into the carved checkpoint.
_RESULT_FILES = [*sorted(checkpoint.CONFIGURATIONS), *checkpoint.TOKENIZER_PATTERNS]

# Remedy when the hub does not answer.
CONNECT = "connect once, or HF_ENDPOINT=https://<mirror> before the command"
# Seconds to wait for the hub; its own client would retry for half a minute.
HUB_TIMEOUT = 2.5
_SILENT_UNTIL: dict[str, float] = {}  # hub → time when it is tried again; 0: it answered


def hub_answers() -> bool:
    """Whether the hub answers: tried until it has once, twice a minute, and never if HF_HUB_OFFLINE is set."""
    if offline_by_choice():
        return False
    until = _SILENT_UNTIL.get(constants.ENDPOINT)
    if until is None or 0 < until < monotonic():
        constants.HF_HUB_OFFLINE = False  # or its client would not ask
        _SILENT_UNTIL[constants.ENDPOINT] = 0.0 if _answers(constants.ENDPOINT) else monotonic() + 30
    constants.HF_HUB_OFFLINE = bool(_SILENT_UNTIL[constants.ENDPOINT])  # its client would try by itself and wait 5 s
    return not constants.HF_HUB_OFFLINE


def _answers(address: str) -> bool:
    answers: list[bool] = []
    # In a thread, since socket timeouts do not end a DNS look-up.
    thread = Thread(target=lambda: answers.append(_ask(address)), daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT)
    return any(answers)


def _ask(address: str) -> bool:
    """Whether a server answers the hub's client, which has proxies and certificates of its own; a 5xx is no answer."""
    try:
        return bool(get_session().head(address, timeout=HUB_TIMEOUT).status_code < 500)
    except Exception:  # noqa: BLE001 - of httpx, which has no class for all of them
        return False


def offline_by_choice() -> bool:
    """Whether the user set offline mode, and not `hub_answers` because the hub did not answer."""
    return bool(constants.HF_HUB_OFFLINE) and not _SILENT_UNTIL.get(constants.ENDPOINT)


def _repository(model: ModelConfig) -> str:
    if model.name is None:
        raise ConfigError("model=hub needs a repository", where="model.name", do="model.name=Qwen/Qwen2.5-0.5B")
    return model.name


def _missing_from_cache(model: ModelConfig, what: str) -> CheckpointError:
    """The error when the hub does not answer and `what` is not in the cache."""
    offline = offline_by_choice()
    silence = "HF_HUB_OFFLINE is set" if offline else f"the hub cannot be reached at {constants.ENDPOINT}"
    what = f"{silence} and {what} not in the cache"
    do = f"{'HF_HUB_OFFLINE=0 before the command' if offline else CONNECT}, or model=local model.path=<its folder>"
    return CheckpointError(what, where=_place(model), do=do)


def _place(model: ModelConfig) -> str:
    return f"model.name={model.name}, model.revision={model.revision or 'main'}"


@contextmanager
def _explained(model: ModelConfig) -> Iterator[None]:
    try:
        yield
    except (HfHubHTTPError, HFValidationError) as error:
        do = "check model.name and model.revision; for a gated model: hf auth login"
        raise CheckpointError(f"the hub refused: {first_line(error)}", where=_place(model), do=do) from error
    except LocalEntryNotFoundError as error:
        raise _missing_from_cache(model, "the model is") from error
    except (HTTPError, OSError, RuntimeError) as error:  # a lost connection, a full disk; RuntimeError: of hf_xet
        what = f"the model cannot be downloaded to {constants.HF_HUB_CACHE}: {first_line(error)}"
        do = "the same command again; if that disk is full, with HF_HUB_CACHE=<folder on another> before it"
        raise CheckpointError(what, where=_place(model), do=do) from error


EMBEDDED = Path(__file__).parent / "embedded"


def resolve_folder(model: ModelConfig) -> Path:
    """The folder of the source; a hub model is downloaded: safetensors, configuration, tokenizer. Raises UserError."""
    if model.kind != "hub":
        return config_folder(model)
    patterns = [*_FILES, "*.py"] if model.trust_remote_code else _FILES
    with _explained(model):
        cached = not hub_answers()
        name = _repository(model)
        found = snapshot_download(name, revision=model.revision, allow_patterns=patterns, local_files_only=cached)
        folder = Path(found)
        others = [shard.name for shard in checkpoint.list_shards(folder) if not cached and not shard.exists()]
        if others:  # an index may name them otherwise, such as layers-0.safetensors
            snapshot_download(name, revision=folder.name, allow_patterns=others)
        return folder


def config_folder(model: ModelConfig) -> Path:
    """The source's folder; for a hub model that of its commit in the cache, with config.json. Raises UserError."""
    if model.kind == "embedded":
        return EMBEDDED
    if model.kind == "hub":
        with _explained(model):
            cached = not hub_answers()
            name = _repository(model)
            return Path(hf_hub_download(name, "config.json", revision=model.revision, local_files_only=cached)).parent
    if model.path is None:
        raise ConfigError("model=local needs a folder", where="model.path", do="model.path=<folder of the checkpoint>")
    return checkpoint.expand_user(model.path)


def check_hub_weights(model: ModelConfig) -> list[CheckpointError]:
    """Errors if a repository of the hub, or the cache without the hub, has no safetensors weights."""
    weights = {checkpoint.SINGLE, checkpoint.INDEX}
    if hub_answers():
        with suppress(HTTPError, OSError):
            files = snapshot_download(_repository(model), revision=model.revision, dry_run=True)
            names = [file.filename for file in files]
            return [] if weights & {*names} else [checkpoint.missing_weights(_repository(model), names)]
    cached = any((config_folder(model) / name).exists() for name in weights)
    return [] if cached else [_missing_from_cache(model, "the model's weights are")]


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder. Raises CheckpointError."""
    path = checkpoint.require_folder(folder) / "config.json"
    try:
        config = checkpoint.read_json(path)
    except OSError as error:
        if mistaken := explain_place(folder):
            raise mistaken from error
        what = f"no checkpoint: cannot read config.json ({error.strerror})"
        inside = folder / "checkpoint"  # of a run or of a stage
        do = f"give {inside}" if (inside / "config.json").is_file() else checkpoint.GIVE_FOLDER
        raise CheckpointError(what, where=str(folder), do=do) from error
    except ValueError as error:
        raise CheckpointError(f"config.json is no JSON: {error}", where=str(path), do="download it again") from error
    if not isinstance(config, dict):
        raise CheckpointError("config.json holds no object", where=str(path), do="download it again")
    for key in _find_hub_code(config):
        what = f"config.json names code of the hub, which is not run: {key}"
        raise CheckpointError(what, where=str(path), do=f"remove {key} from it")
    return config


# Settings with which transformers chooses kernels; a value with a slash is a repository of code that it would run.
KERNEL_KEYS = {f"{start}{part}_implementation" for start in ("", "_") for part in ("attn", "experts")}


def _find_hub_code(config: dict[str, Any]) -> Iterator[str]:
    waiting: list[Any] = [config]  # no recursion: JSON may be nested as deeply as Python calls
    while waiting:
        values = waiting.pop()
        if isinstance(values, dict):
            yield from (key for key in KERNEL_KEYS & values.keys() if "/" in str(values[key]))
            waiting += values.values()
        elif isinstance(values, list):
            waiting += values


# What values of another kind than expected raise where a checkpoint's settings are used.
ODD_VALUES = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RecursionError)


@contextmanager
def explained_config(folder: Path | str) -> Iterator[None]:
    """Turn errors at a value of another kind than expected, in config.json or beside it, into CheckpointError."""
    try:
        yield
    except ODD_VALUES as error:
        what = f"config.json or tokenizer_config.json has a value that no model has: {type(error).__name__} {error}"
        raise CheckpointError(what[:300], where=str(folder), do="download or copy these files again") from error


def source_cache_key(model: ModelConfig, hash_of: Callable[[Path], str] = hash_file) -> dict[str, Any]:
    """Name and commit of a hub model; else hashes of weights, configuration and tokenizer. Raises UserError."""
    folder = config_folder(model)
    if model.kind == "hub":
        # The hub's cache keeps each revision in a folder named by its commit.
        return {"name": model.name, "commit": folder.name}
    patterns = [*_RESULT_FILES, "*.py"] if model.trust_remote_code else _RESULT_FILES
    files = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return {"files": {path.name: hash_of(path) for path in sorted(files | {*checkpoint.list_shards(folder)})}}
