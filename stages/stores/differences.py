"""What keeps the sums of one scan out of those of another, in words."""

import json
from collections.abc import Mapping
from typing import Any


def describe_differences(held: str, wanted: str) -> str:
    """The facts in which two identities differ, each a JSON object: theirs, and ours in brackets."""
    return ", ".join(list_differences(json.loads(held), json.loads(wanted)))


def list_differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """One entry for each fact that is not the same."""
    return [
        f"{name} {theirs.get(name, 'unset')} (here {ours.get(name, 'unset')})"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    ]
