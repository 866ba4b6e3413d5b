"""Command lines to paste."""

import shlex
from collections.abc import Sequence


def command_line(overrides: Sequence[str], **changes: object) -> str:
    """The command that was typed, with some settings changed."""
    kept = [word for word in overrides if word.partition("=")[0] not in changes]
    return shlex.join(["python", "-m", "pipeline", *kept, *(f"{key}={value}" for key, value in changes.items())])
