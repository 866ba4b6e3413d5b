"""Published evaluations, and which of them can be held against each other."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from instruments.errors import ContractError
from models.config import MoEShape
from pipeline.report.chain import REMEDY, Published, read_chain, read_published, settings_of_carve


@dataclass(frozen=True)
class Evaluation:
    """One published evaluation: `evaluation.json` and where it came from."""

    published: Published
    shape: MoEShape
    width: int
    heldout_tokens: int
    models: Mapping[str, Mapping[str, Any]]
    layers: Sequence[Mapping[str, Any]]

    @property
    def share(self) -> float:
        """Part of the dense FFN's neurons that serve a token; above 1 where copies outnumber neurons."""
        return self.shape.active_width / self.width

    @property
    def seed(self) -> int:
        """Seed of everything random."""
        return int(self.published.settings["seed"])

    @cached_property
    def chain(self) -> Mapping[str, Published]:
        """All results it was made from, itself the last."""
        return read_chain(self.published)

    @cached_property
    def settings(self) -> Mapping[str, object]:
        """What decided the carve beside source, shape, seed and held-out text."""
        return settings_of_carve(self.chain)

    def gap(self, name: str) -> float | None:
        """Loss above the dense model's, nats per token; None where that model was not measured."""
        return float(self.models[name]["gap"]) if name in self.models else None

    @property
    def text(self) -> tuple[object, ...]:
        """What has to be equal for losses to be comparable: the source model, and the held-out tokens."""
        recipe = self.published.manifest.recipe
        elsewhere = {"tokens", "path", "heldout_path"}  # calibration only, or compared by content
        data = {key: value for key, value in recipe["settings"]["data"].items() if key not in elsewhere}
        source, texts = dict(recipe["identity"]["model"]), dict(recipe["identity"]["data"])
        if "shards" in source:  # a copy has another time
            source["shards"] = [{**shard, "mtime_ns": 0} for shard in source["shards"]]
        if "heldout_files" in texts:
            texts["files"] = []
        return source, texts, data, self.heldout_tokens


def read_evaluation(folder: Path) -> Evaluation:
    """A published evaluation. Raises ContractError: damaged or of another version."""
    published = read_published(folder)
    path = folder / "evaluation.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        shape = MoEShape(**record["shape"])
        return Evaluation(
            published, shape, record["dense_width"], record["heldout_tokens"], record["models"], record["layers"]
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ContractError(f"no readable evaluation: {error!r}", where=str(path), do=REMEDY) from error


def find_comparable(wanted: Evaluation) -> list[Evaluation]:
    """Every published evaluation of the same source on the same held-out text, `wanted` among them, newest first.

    What cannot be read is left out: an old or damaged result says nothing about this one.
    """
    artifacts = wanted.published.folder.parents[2]
    found = []
    manifests = artifacts.glob("*/evaluate/*/manifest.json")
    for manifest in sorted(manifests, key=lambda path: (-path.stat().st_mtime_ns, path)):
        try:
            evaluation = read_evaluation(manifest.parent)
            comparable = evaluation.text == wanted.text
        except (ContractError, KeyError, TypeError):
            continue
        if comparable:
            found.append(evaluation)
    return found
