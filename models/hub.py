"""A model of the Hugging Face hub, and what can go wrong on the way to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Thread
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from huggingface_hub import constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from models.config import ModelConfig
from models.errors import CheckpointError, ConfigError

# Not every *.safetensors: some repositories hold the same weights a second time under another name.
_FILES = ["model*.safetensors", "*.json", "tokenizer*", "*.model", "merges.txt", "*.jinja", "LICENSE*", "NOTICE*"]

# Advice where the hub does not answer.
CONNECT = "connect once, or HF_ENDPOINT=https://<mirror> before the command"
# Seconds to wait for the hub before saying that it cannot be reached; its own client asks six times, for half a minute.
HUB_TIMEOUT = 2.5


def hub_answers() -> bool:
    """Whether the hub is there: asked once in a process, and never where HF_HUB_OFFLINE is set."""
    return not constants.HF_HUB_OFFLINE and _answers(constants.ENDPOINT)


@cache
def _answers(address: str) -> bool:
    answers: list[bool] = []
    # A thread, since no timeout of a socket ends the look-up of a name that no server answers.
    thread = Thread(target=lambda: answers.append(_ask(address)), daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT)
    return any(answers)


def _ask(address: str) -> bool:
    """Whether a server answers; a gateway's word that there is none behind it is no answer."""
    try:
        urlopen(Request(address, method="HEAD"), timeout=HUB_TIMEOUT).close()
    except HTTPError as answer:
        answer.close()
        return answer.code < 500
    except (OSError, ValueError):
        return False
    return True


def download_model(model: ModelConfig) -> Path:
    """The folder of its safetensors, configuration and tokenizer; code only where it is trusted. Raises UserError."""
    patterns = [*_FILES, "*.py"] if model.trust_remote_code else _FILES
    with _explained(model):
        return Path(
            snapshot_download(
                repository(model),
                revision=model.revision,
                allow_patterns=patterns,
                local_files_only=not hub_answers(),
            )
        )


def download_config(model: ModelConfig) -> Path:
    """Its config.json alone, in a folder named by the commit. Raises UserError."""
    with _explained(model):
        cached = not hub_answers()
        return Path(hf_hub_download(repository(model), "config.json", revision=model.revision, local_files_only=cached))


def list_files(model: ModelConfig) -> list[str] | None:
    """Names of all its files; None where the hub does not answer."""
    if not hub_answers():
        return None
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


def missing_from_cache(model: ModelConfig, what: str) -> CheckpointError:
    """The error of a hub that does not answer, where the cache has not got `what`."""
    offline = constants.HF_HUB_OFFLINE
    silence = "HF_HUB_OFFLINE is set" if offline else f"the hub cannot be reached at {constants.ENDPOINT}"
    return CheckpointError(
        f"{silence} and {what} not in the cache",
        where=_place(model),
        do=f"{'HF_HUB_OFFLINE=0 before the command' if offline else CONNECT}, or model=local model.path=<its folder>",
    )


def _place(model: ModelConfig) -> str:
    return f"model.name={model.name}, model.revision={model.revision or 'main'}"


@contextmanager
def _explained(model: ModelConfig) -> Iterator[None]:
    try:
        yield
    except (HfHubHTTPError, HFValidationError) as error:
        do = "check model.name and model.revision; for a gated model: hf auth login"
        raise CheckpointError(f"the hub refused: {str(error).splitlines()[0]}", where=_place(model), do=do) from error
    except OSError as error:
        raise missing_from_cache(model, "the model is") from error
