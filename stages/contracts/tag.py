"""What a safetensors file says of itself, in one metadata entry.

safetensors writes several entries in no fixed order; one keeps equal contents equal byte for byte, which published
results are compared by.
"""

import json
from collections.abc import Mapping
from typing import Any

_KEY = "tiny_onn"


def pack_tag(**values: Any) -> dict[str, str]:  # noqa: ANN401 - anything JSON can say
    """Metadata for `save_file`."""
    return {_KEY: json.dumps(values, sort_keys=True)}


def unpack_tag(metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """What `pack_tag` was given; empty for a file without one."""
    tag: dict[str, Any] = json.loads((metadata or {}).get(_KEY, "{}"))
    return tag
