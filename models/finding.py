"""Find the dense decoder in a folder once, and keep its description on disk: later plans need no torch."""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from instruments.files import hash_code, write_json
from models.checkpoint.folder import has_weights, read_checkpoint
from models.config import ModelConfig
from models.decoder import Decoder, FFNPlan, Rows
from models.source import config_folder, read_config


def source_decoder(model: ModelConfig, *, text_only: bool = False) -> Decoder:
    """The dense decoder of a source; of a hub model from config.json alone. Raises UserError."""
    return find_decoder(config_folder(model), weights=model.kind != "hub", text_only=text_only)


def find_decoder(folder: Path, *, weights: bool = True, text_only: bool = False) -> Decoder:
    """The dense decoder in a checkpoint folder, also before its weights are there; `text_only`: see `text_part`.

    Raises CheckpointError: there is none; ConfigError: it has no text part.
    """
    weights = weights and has_weights(folder)
    return _kept(folder, weights, text_only, description_path(folder, weights, text_only))


def description_path(folder: Path, weights: bool, text_only: bool) -> Path:
    """Where the description of this decoder is kept."""
    entries = read_checkpoint(folder) if weights else {}
    shapes = sorted((name, tuple(entry.shape)) for name, entry in entries.items())
    key = hashlib.sha256(json.dumps([_code(), read_config(folder), shapes, text_only]).encode()).hexdigest()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tiny-onn" / f"{key}.json"


@lru_cache(maxsize=32)
def _kept(folder: Path, weights: bool, text_only: bool, place: Path) -> Decoder:
    with suppress(OSError, ValueError, TypeError, KeyError):
        return from_json(json.loads(place.read_text(encoding="utf-8")))
    # Importing torch and transformers takes seconds; a plan of a known model does without them.
    from models.structure import describe  # noqa: PLC0415
    from models.text_part import text_part  # noqa: PLC0415

    decoder = describe(folder, weights=weights)
    decoder = text_part(folder, decoder) if text_only else decoder
    with suppress(OSError):  # a home that cannot be written costs these seconds again
        place.parent.mkdir(parents=True, exist_ok=True)
        write_json(place, asdict(decoder))
    return decoder


def from_json(content: Mapping[str, Any]) -> Decoder:
    """The decoder that `asdict` wrote as JSON."""
    ffn = content["ffn"]
    plan = FFNPlan(**ffn | {name: Rows(**ffn[name]) for name in ("gate", "up")})
    shapes = {name: tuple(shape) for name, shape in content["shapes"].items()}
    stored = {name: tuple(parts) for name, parts in content["stored"].items()}
    return Decoder(**{**content, "ffn": plan, "shapes": shapes, "stored": stored, "unknown": tuple(content["unknown"])})


@lru_cache(maxsize=1)
def _code() -> str:
    """Hash of this package, and the versions of those that it describes models with."""
    return " ".join([hash_code(Path(__file__).parent, ["."]), *map(version, ("torch", "transformers"))])
