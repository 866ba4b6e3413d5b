"""JSON values in the metadata of a safetensors file. Without torch: a report is also written while torch loads."""

import json
from collections.abc import Mapping
from typing import Any

_KEY = "tiny_onn"


def pack_tag(**values: Any) -> dict[str, str]:  # noqa: ANN401 - any JSON value
    """Metadata for `save_file` with these values as JSON."""
    return {_KEY: json.dumps(values, sort_keys=True)}


def unpack_tag(metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """The values given to `pack_tag`; empty if the metadata has none. Raises ValueError: not JSON."""
    tag: dict[str, Any] = json.loads((metadata or {}).get(_KEY, "{}"))
    return tag
