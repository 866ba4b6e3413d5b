"""The published results that one result was made from."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.artifacts import Manifest, is_complete
from pipeline.report.run_record import SHORT
from pipeline.stages_table import STAGES

REMEDY = "run the stage again, with fresh=true"
# Settings that change no figure of an evaluation: pictures, speed, and what stands in its place elsewhere.
IRRELEVANT = ("cluster.map", "evaluate.", "store.", "seed", "shape.", "data.")
# Where the source lies and what it is called: its content is compared instead.
IRRELEVANT_OF_MODEL = tuple(f"model.{key}" for key in ("label", "path", "name", "revision", "experts", "n", "kind"))


@dataclass(frozen=True)
class Published:
    """One published folder with its manifest."""

    folder: Path
    manifest: Manifest

    @property
    def stage(self) -> str:
        """Which stage made it."""
        return str(self.manifest.recipe["stage"])

    @property
    def settings(self) -> Mapping[str, Any]:
        """Node → settings, as they entered the fingerprint."""
        settings: Mapping[str, Any] = self.manifest.recipe["settings"]
        return settings


def read_published(folder: Path) -> Published:
    """A published folder. Raises ContractError."""
    return Published(folder, Manifest.read(folder, remedy=REMEDY))


def read_chain(last: Published) -> dict[str, Published]:
    """Stage → published result, for `last` and all it started from, in the order of the chain.

    What was removed since is left out.
    """
    found: dict[str, Published] = {}
    waiting = [last]
    while waiting:
        current = waiting.pop()
        found[current.stage] = current
        for name, fingerprint in current.manifest.recipe["parents"].items():
            folder = current.folder.parents[1] / name / fingerprint[:SHORT]
            if name not in found and is_complete(folder):
                waiting.append(read_published(folder))
    return {name: found[name] for name in STAGES if name in found}


def settings_of_carve(chain: Mapping[str, Published]) -> dict[str, object]:
    """What decided the carve beside its source, shape, seed and held-out text: dotted name → value."""
    flat: dict[str, object] = {}
    for name, published in chain.items():
        flat |= flatten(published.settings)
        flat[f"{name} version"] = published.manifest.recipe["version"]
    kept = {key: value for key, value in flat.items() if not key.startswith(IRRELEVANT + IRRELEVANT_OF_MODEL)}
    kept.pop("evaluate version", None)
    return kept | {key: flat[key] for key in ("data.tokens",) if key in flat}


def flatten(node: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Nested settings by dotted names."""
    flat: dict[str, object] = {}
    for key, value in node.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
