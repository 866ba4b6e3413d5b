"""A model of the Hugging Face hub, and what can go wrong on the way to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from models.config import ModelConfig
from models.errors import CheckpointError, ConfigError

# Not every *.safetensors: some repositories hold the same weights a second time under another name.
_FILES = ["model*.safetensors", "*.json", "tokenizer*", "*.model", "merges.txt", "*.jinja", "LICENSE*", "NOTICE*"]


def download_model(model: ModelConfig) -> Path:
    """The folder of its safetensors, configuration and tokenizer; code only where it is trusted. Raises UserError."""
    patterns = [*_FILES, "*.py"] if model.trust_remote_code else _FILES
    with _explained(model):
        return Path(snapshot_download(repository(model), revision=model.revision, allow_patterns=patterns))


def download_config(model: ModelConfig) -> Path:
    """Its config.json alone, in a folder named by the commit. Raises UserError."""
    with _explained(model):
        return Path(hf_hub_download(repository(model), "config.json", revision=model.revision))


def list_files(model: ModelConfig) -> list[str] | None:
    """Names of all its files; None where the hub does not answer."""
    try:
        files = snapshot_download(repository(model), revision=model.revision, dry_run=True)
    except OSError:
        return None
    return [file.filename for file in files]


def repository(model: ModelConfig) -> str:
    """The repository's name. Raises ConfigError: none given."""
    if model.name is None:
        raise ConfigError("model=hub needs a repository", where="model.name", do="model.name=Qwen/Qwen2.5-0.5B")
    return model.name


@contextmanager
def _explained(model: ModelConfig) -> Iterator[None]:
    where = f"model.name={model.name}, model.revision={model.revision or 'main'}"
    try:
        yield
    except (HfHubHTTPError, HFValidationError) as error:
        do = "check model.name and model.revision; for a gated model: hf auth login"
        raise CheckpointError(f"the hub refused: {str(error).splitlines()[0]}", where=where, do=do) from error
    except OSError as error:
        raise CheckpointError(
            "the hub cannot be reached and the model is not in the cache",
            where=where,
            do="connect once, or model=local model.path=<folder of the checkpoint>",
        ) from error
