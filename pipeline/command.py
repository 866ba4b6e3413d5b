"""The command line as text: to paste, and without passwords."""

import re
import shlex
from collections.abc import Sequence

from instruments.errors import redact
from stages.accumulators.config import hide_password

# Between the addresses of a sweep.
_NEXT_ADDRESS = re.compile(r",(?=\w+://)")


def command_line(overrides: Sequence[str], **changes: object) -> str:
    """The command that was typed, with some settings changed."""
    kept = [word for word in overrides if word.partition("=")[0] not in changes]
    return redact(
        shlex.join(["python", "-m", "pipeline", *kept, *(f"{key}={value}" for key, value in changes.items())])
    )


def hide_passwords(words: Sequence[str]) -> list[str]:
    """The words without the password of the store, which this process remembers. Everything else is kept."""
    return [_hide_password(word) if word.lstrip("+").startswith("store.url=") else word for word in words]


def _hide_password(word: str) -> str:
    key, _equals, value = word.partition("=")
    for address in _NEXT_ADDRESS.split(value):
        hide_password(address.strip("'\""))
    return f"{key}={','.join(map(redact, _NEXT_ADDRESS.split(value)))}"
