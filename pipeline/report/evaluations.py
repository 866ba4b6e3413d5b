"""Reads published results with their ancestors, and finds comparable evaluations."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from instruments.errors import ContractError
from models.config import TOPOLOGIES, MoEShape
from pipeline.artifacts import LARGEST, SHORT, UNREADABLE, Manifest, is_complete
from pipeline.settings import STAGES

TINY = 1e-6  # nats; smaller gaps are not divided by
REMEDY = "run the stage again, with fresh=true"
# Settings that change no number of an evaluation (pictures, speed), or that are compared separately.
IRRELEVANT = ("cluster.map", "evaluate.", "store.", "seed", "shape.", "data.")
# Settings of data that affect the carve, but not the held-out text.
CALIBRATION = ("data.tokens", "data.sample_tokens")
# Location and name of the source; its content is compared instead.
IRRELEVANT_OF_MODEL = tuple(f"model.{key}" for key in ("label", "path", "name", "revision", "experts", "n", "kind"))


@dataclass(frozen=True)
class Published:
    """One published folder with its manifest."""

    folder: Path
    manifest: Manifest
    stage: str  # that computed it
    settings: Mapping[str, Any]  # node → settings in the fingerprint
    parents: Mapping[str, str]  # stage → fingerprint

    @property
    def tokens(self) -> int | None:
        """Tokens of calibration text that the stage may read."""
        data, own = self.settings.get("data"), self.settings.get(self.stage)
        if self.stage == "train" and isinstance(own, dict):  # instead of data.tokens
            return own.get("tokens")
        return data.get("tokens") if isinstance(data, dict) else None


def read_published(folder: Path) -> Published:
    """Read a published folder. Raises ContractError: the manifest is missing, damaged or of an unknown stage."""
    manifest = Manifest.read(folder, remedy=REMEDY)
    try:
        stage, settings, parents = (manifest.recipe[key] for key in ("stage", "settings", "parents"))
        if not {stage, *parents} <= STAGES.keys() or not all(mark.isalnum() for mark in parents.values()):
            raise ValueError("unknown stages")
        return Published(folder, manifest, stage, {**settings}, parents)
    except UNREADABLE as error:
        what = f"the manifest has no valid stage, settings and parents: {error}"
        raise ContractError(what, where=str(folder), do=REMEDY) from error


def read_chain(last: Published) -> dict[str, Published]:
    """Stage → published result, for `last` and its ancestors that still exist, in the order of the chain."""
    found: dict[str, Published] = {}
    waiting = [last]
    while waiting:
        current = waiting.pop()
        found[current.stage] = current
        for name, fingerprint in current.parents.items():
            folder = current.folder.parents[1] / name / fingerprint[:SHORT]
            if name not in found and is_complete(folder):
                waiting.append(read_published(folder))
    return {name: found[name] for name in STAGES if name in found}


@dataclass(frozen=True)
class Evaluation:
    """One published evaluation: `evaluation.json`, and the results it depends on."""

    published: Published
    shape: MoEShape
    width: int
    seed: int
    text: tuple[object, ...]  # source and held-out tokens: losses are comparable only if these are equal
    models: Mapping[str, Mapping[str, float]]
    layers: Sequence[Mapping[str, Any]]

    @property
    def share(self) -> float:
        """Share of the dense FFN's neurons that serve a token; above 1 if experts copy neurons often enough."""
        return self.shape.active_share(self.width, len(self.layers))

    @cached_property
    def chain(self) -> Mapping[str, Published]:
        """Stage → result, for all results it depends on and itself, the last."""
        return read_chain(self.published)

    @cached_property
    def settings(self) -> Mapping[str, object]:
        """Dotted name → value of what affects the carve, without source, shape, seed and held-out text."""
        flat: dict[str, object] = {}
        for name, published in self.chain.items():
            flat |= _flatten(published.settings)
            flat[f"{name} version"] = published.manifest.recipe.get("version")
        kept = {key: value for key, value in flat.items() if not key.startswith(IRRELEVANT + IRRELEVANT_OF_MODEL)}
        kept.pop("evaluate version", None)
        # With held-out text of its own, the calibration text may be another one.
        files = json.dumps(self.published.manifest.recipe["identity"]["data"].get("files"))
        kept["calibration text"] = sha256(files.encode()).hexdigest()[:8]
        return kept | {key: flat[key] for key in CALIBRATION if key in flat}

    def gap(self, name: str) -> float | None:
        """Loss above the dense model's, nats per token; None if the model was not measured."""
        return self.models[name]["gap"] if name in self.models else None

    def is_same_method(self, other: "Evaluation") -> bool:
        """Whether the other has equal settings, topology, number and width of experts; the active width may differ."""
        mine, theirs = ((shape.experts, shape.n, shape.topology) for shape in (self.shape, other.shape))
        return mine == theirs and self.settings == other.settings

    def find_comparable(self) -> list["Evaluation"]:
        """All readable evaluations of the same source on the same held-out text, including this, newest first."""
        manifests = self.published.folder.parents[2].glob("*/evaluate/*/manifest.json")
        found = []
        for manifest in sorted(manifests, key=lambda path: (-path.stat().st_mtime_ns, path)):
            with suppress(ContractError):
                evaluation = read_evaluation(manifest.parent)
                if evaluation.text == self.text:
                    found.append(evaluation)
        return found


def _flatten(node: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in node.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def read_evaluation(folder: Path) -> Evaluation:
    """Read a published evaluation. Raises ContractError: damaged or of another version."""
    published = read_published(folder)
    path = folder / "evaluation.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        sizes = {**record["shape"], "dense_layers": tuple(record["shape"].get("dense_layers", ()))}
        shape, width = MoEShape(**sizes), record["dense_width"]
        counts = (shape.experts, shape.n, shape.top_k, width, shape.always_on + 1)
        if not all(isinstance(count, int) and 0 < count < LARGEST for count in counts):
            raise ValueError(f"{shape} is no shape")
        if shape.topology not in TOPOLOGIES or not {"dense", "carved"} <= record["models"].keys():
            raise ValueError("a topology that is unknown, or a model that is missing")
        figures = {
            name: {key: float(model[key]) for key in ("gap", "loss", "perplexity")}
            for name, model in record["models"].items()
        }
        layers = [_read_layer(**layer) for layer in record["layers"]]
        if len({len(layer["load"]) for layer in layers}) > 1:
            raise ValueError("layers of different kinds")
        text = _describe_text(published.manifest.recipe, record["heldout_tokens"])
        return Evaluation(published, shape, width, int(published.settings["seed"]), text, figures, layers)
    except UNREADABLE as error:
        raise ContractError(f"no readable evaluation: {error!r}", where=str(path), do=REMEDY) from error


def _read_layer(error: float, agreement: float, load: Sequence[float] = (), **more: object) -> Mapping[str, Any]:
    return {"error": float(error), "agreement": float(agreement), **more, "load": [*map(float, load)]}


def _describe_text(recipe: Mapping[str, Any], heldout_tokens: object) -> tuple[object, ...]:
    elsewhere = {"tokens", "sample_tokens", "path", "heldout_path"}  # affect calibration only, or compared by content
    data = {key: value for key, value in recipe["settings"]["data"].items() if key not in elsewhere}
    source, texts = dict(recipe["identity"]["model"]), dict(recipe["identity"]["data"])
    if "heldout_files" in texts:
        texts["files"] = []
    return source, texts, data, heldout_tokens


@dataclass(frozen=True)
class Point:
    """A gap at one active width: mean, lowest and highest over `count` seeds."""

    x: float  # active share
    mean: float
    low: float
    high: float
    count: int = 1

    def __truediv__(self, by: float) -> "Point":
        """The point as a share of another gap."""
        return Point(self.x, self.mean / by, self.low / by, self.high / by, self.count)


Group = Sequence[Evaluation]  # that differ only in the seed


def point_of(group: Group, name: str) -> Point | None:
    """The gap of a model over the seeds; None if it was not measured."""
    gaps = [gap for member in group if (gap := member.gap(name)) is not None]
    return Point(group[0].share, sum(gaps) / len(gaps), min(gaps), max(gaps), len(gaps)) if gaps else None


def seeds_of(group: Group) -> list[int]:
    """The seeds, ascending."""
    return sorted({member.seed for member in group})


def group_by_seed(evaluations: Iterable[Evaluation]) -> list[list[Evaluation]]:
    """Groups from the widest carve to the narrowest; of several evaluations with the same seed, the first is used."""
    groups: list[list[Evaluation]] = []
    for found in evaluations:
        same = [group for group in groups if (group[0].shape, group[0].settings) == (found.shape, found.settings)]
        if not same:
            groups.append([found])
        elif found.seed not in seeds_of(same[0]):
            same[0].append(found)
    return sorted(groups, key=lambda group: -group[0].share)


def curves_of(groups: Sequence[Group], names: Sequence[str], reference: str = "") -> dict[str, list[Point]]:
    """Model → its gap at every width, widest first; with a `reference`, divided by that model's gap at that width."""
    curves: dict[str, list[Point]] = {}
    for name in [name for name in names if name != "dense"]:
        for group in groups:
            point, base = point_of(group, name), point_of(group, reference)
            if point is not None and not (reference and (base is None or base.mean <= TINY)):
                curves.setdefault(name, []).append(point / base.mean if base else point)
    return curves
