"""Content addressing: equal fingerprints mean equal results."""

import json
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from hashlib import sha256
from types import MappingProxyType
from typing import Any

from pipeline.stages_table import Stage
from pipeline.unread import Unread

# Nodes that point outside the repository: what they point at counts too, not only their words.
IDENTIFIED = ("model", "data")


def make_recipe(
    stage: Stage,
    nodes: Mapping[str, object],
    identities: Mapping[str, Mapping[str, Any]],
    parents: Mapping[str, str],
    unread: Unread = MappingProxyType({}),
) -> dict[str, Any]:
    """Everything that decides the result of a stage, as plain JSON.

    Args:
        stage: which stage, with its version.
        nodes: all resolved settings by node name; only those the stage looks at are taken ...
        identities: content of the source model and of the data (`model`, `data`).
        parents: fingerprints of the stages it starts from.
        unread: ... without the settings that nobody reads.
    """
    looked_at = [name for name in stage.nodes if name not in stage.unread]
    return {
        "stage": stage.name,
        "version": stage.version,
        "settings": {name: plain_settings(nodes[name], unread.get(name, ())) for name in looked_at},
        "identity": {name: dict(identities[name]) for name in looked_at if name in IDENTIFIED},
        "parents": {name: parents[name] for name in stage.parents},
    }


def plain_settings(node: object, unread: Collection[str] = ()) -> object:
    """A node as JSON values, without what is unread and the fields marked `metadata={"fingerprint": False}`.

    Such a field changes where, how fast or how safely a stage works, never what comes out.
    """
    if not is_dataclass(node):
        return node
    counted = [spec.name for spec in fields(node) if spec.metadata.get("fingerprint", True) and spec.name not in unread]
    return {name: plain_settings(getattr(node, name)) for name in counted}


def fingerprint(recipe: Mapping[str, Any]) -> str:
    """SHA-256 of the recipe, independent of the order of its keys."""
    return sha256(json.dumps(recipe, sort_keys=True, allow_nan=False).encode()).hexdigest()
