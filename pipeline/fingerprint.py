"""Content addressing: equal fingerprints mean equal results."""

import json
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from hashlib import sha256
from typing import Any

from pipeline.stages_table import Stage

# Nodes that point outside the repository: what they point at counts too, not only their words.
IDENTIFIED = ("model", "data")


def make_recipe(
    stage: Stage,
    nodes: Mapping[str, object],
    identities: Mapping[str, Mapping[str, Any]],
    parents: Mapping[str, str],
) -> dict[str, Any]:
    """Everything that decides the result of a stage, as plain JSON.

    Args:
        stage: which stage, with its version.
        nodes: all resolved settings by node name; only those the stage reads are taken.
        identities: content of the source model and of the data (`model`, `data`).
        parents: fingerprints of the stages it starts from.
    """
    return {
        "stage": stage.name,
        "version": stage.version,
        "settings": {name: plain_settings(nodes[name]) for name in stage.nodes},
        "identity": {name: dict(identities[name]) for name in stage.nodes if name in IDENTIFIED},
        "parents": {name: parents[name] for name in stage.parents},
    }


def plain_settings(node: object) -> object:
    """A node as JSON values, without the fields marked `metadata={"fingerprint": False}`.

    Such a field changes where, how fast or how safely a stage works, never what comes out. One that is marked
    `"unless default"` came later, with what was done before as its default: what was published then is found again.
    """
    if not is_dataclass(node):
        return node
    return {spec.name: plain_settings(getattr(node, spec.name)) for spec in fields(node) if _counts(spec, node)}


def _counts(spec: Field[Any], node: Any) -> bool:  # noqa: ANN401 - any dataclass
    mark = spec.metadata.get("fingerprint", True)
    return bool(getattr(node, spec.name) != spec.default if mark == "unless default" else mark)


def fingerprint(recipe: Mapping[str, Any]) -> str:
    """SHA-256 of the recipe, independent of the order of its keys."""
    return sha256(json.dumps(recipe, sort_keys=True, allow_nan=False).encode()).hexdigest()
