"""Programs that serve or judge a model: their interpreters, the files that they may see, and steps run in them."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from instruments.errors import CheckpointError, ConfigError, UserError
from models.checkpoint.folder import INDEX, PROCESSORS, SINGLE, list_shards, read_json
from models.source import KERNEL_KEYS, explained_config, read_config
from models.targets.config import target_of
from models.targets.tiny_onn import AUTO_CLASSES, copy_code

# Files that clients read in addition to config.json and the weights; none of them is code.
SETTINGS = (
    "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.json", *PROCESSORS,
)  # fmt: skip
OTHERS = (
    "tokenizer.json", "vocab.json", "added_tokens.json", "merges.txt", "*.model", "tekken.json", "chat_template.jinja",
    "README.md",
)  # fmt: skip
# Keys with which transformers finds code: in the folder, in other repositories, or in kernels of the hub.
CODE_KEYS = {"auto_map", *KERNEL_KEYS}


@dataclass(frozen=True)
class Clients:
    """Paths of llama.cpp's source and of Python interpreters, with the versions of the clients that each has."""

    llama_cpp: Path | None
    found: Mapping[Path, Mapping[str, str]]  # interpreter → client → version; this one first

    def holding(self, client: str) -> Path | None:
        """The first interpreter that has the client."""
        return next((python for python, versions in self.found.items() if client in versions), None)

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Add the options with the paths of clients."""
        parser.add_argument(
            "--llama-cpp", type=Path, metavar="FOLDER", help="llama.cpp's source, for its converter (or LLAMA_CPP)"
        )
        parser.add_argument(
            "--python", type=Path, action="append", default=[], metavar="PATH", help="another interpreter with clients"
        )

    @classmethod
    def of(cls, wanted: argparse.Namespace) -> "Clients":
        """This interpreter and those of --python. Raises ConfigError: a path is no interpreter."""
        folder = wanted.llama_cpp or os.environ.get("LLAMA_CPP")
        if missing := [str(path) for path in wanted.python if not os.access(path, os.X_OK) or path.is_dir()]:
            do = "--python FOLDER_OF_ENVIRONMENT/bin/python"
            raise ConfigError(f"no interpreter: {', '.join(missing)}", where="--python", do=do)
        pythons = (Path(sys.executable), *wanted.python)
        return cls(Path(folder) if folder else None, {python: run_client(python, "probe", {}) for python in pythons})


@contextmanager
def readable_copy(checkpoint: Path, *, respell: bool = False) -> Iterator[Path]:
    """A temporary folder with a carve's name, links to weights, its tokenizer, and settings that name no code.

    It is all that a client sees of a checkpoint: some run Python that is in its folder, or that its settings name. The
    only Python in it is the project's own, for TinyONN. `respell`: for llama.cpp's converter, which may know the carve
    by another class, and whose transformers may be 4.57, which then reads the tokenizer settings.
    Raises CheckpointError: it cannot be read.
    """
    with explained_config(checkpoint), TemporaryDirectory() as place:
        folder = Path(place) / checkpoint.resolve().name
        folder.mkdir()
        _copy_settings(checkpoint, folder, respell=respell)
        files = [path for path in list_shards(checkpoint) if path.suffix == ".safetensors"]
        files += [] if (checkpoint / SINGLE).is_file() else [checkpoint / INDEX]
        for path in files:
            (folder / path.name).symlink_to(path.resolve())
        for path in (path for pattern in OTHERS for path in checkpoint.glob(pattern) if path.is_file()):
            shutil.copyfile(path, folder / path.name)
        yield folder


def _copy_settings(checkpoint: Path, folder: Path, *, respell: bool) -> None:
    stored = read_config(checkpoint)
    found = {name: read_settings(checkpoint / name) for name in SETTINGS if (checkpoint / name).is_file()}
    found["config.json"] = read_settings(checkpoint / "config.json")
    target, architecture = target_of(stored)
    found["config.json"]["architectures"] = [architecture]
    if respell:
        inner = found["config.json"].get("text_config")
        text = inner if isinstance(inner, dict) else found["config.json"]
        text |= target.llama_cpp_keys(text)
    for part in ("text_config", "vision_config", "audio_config"):  # by which converters choose their code, too
        if isinstance(inner := found["config.json"].get(part), dict):
            inner.pop("architectures", None)
    if target.is_tiny_onn:
        copy_code(folder)
        named = stored.get("auto_map")
        kept = named if isinstance(named, dict) else {}
        found["config.json"]["auto_map"] = {name: place for name, place in AUTO_CLASSES.items() if name in kept}
    if respell and "tokenizer_config.json" in found:
        from models.emit import respell_tokenizer  # noqa: PLC0415 - imports torch, which is slow

        found["tokenizer_config.json"] = respell_tokenizer(found["tokenizer_config.json"])
    for name, values in found.items():
        (folder / name).write_text(json.dumps(values), encoding="utf-8")


def read_settings(path: Path) -> dict[str, Any]:
    """A JSON file of a checkpoint without the keys that name code. Raises CheckpointError: it holds no object."""
    try:
        stored = json.dumps(read_json(path))
        values = json.loads(
            stored, object_hook=lambda found: {key: value for key, value in found.items() if key not in CODE_KEYS}
        )
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is no JSON: {error}", where=str(path), do="download it again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path.name} holds no object", where=str(path), do="download it again")
    return values


def run_client(python: Path, step: str, request: Mapping[str, Any], **environment: str) -> dict[str, Any]:
    """Run a step of `client_process.py` in an interpreter. Raises UserError with the last line of its output."""
    script = Path(__file__).with_name("client_process.py")
    with TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "request.json", Path(folder) / "result.json"
        asked.write_text(json.dumps(request), encoding="utf-8")
        # The client must not import packages of this project's environment.
        inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            [python, script, step, asked, answered],
            capture_output=True, text=True, check=False, env=inherited | {"HF_HUB_OFFLINE": "1"} | environment,
        )  # fmt: skip
        if done.returncode or not answered.exists():
            if done.returncode == -signal.SIGKILL:
                what = f"{step} was killed, most likely for lack of memory"
                raise UserError(what, where=str(python), do="free some memory, or use a larger machine")
            said = [line for line in (done.stderr.strip() or done.stdout.strip()).splitlines() if line.strip()]
            raise UserError(f"{step} failed: {said[-1] if said else 'it printed nothing'}", where=str(python))
        result: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
        return result
