"""Settings of the accumulator."""

from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

from instruments.errors import redact

# Address without its password → the password; only in the memory of this process.
_PASSWORDS: dict[str, str] = {}


def hide_password(url: str) -> str:
    """The address without its password; `find_password` returns the password."""
    hidden = redact(url)
    if hidden != url:
        with suppress(ValueError):  # not an address: reported when it is used
            parts = urlsplit(url)
            options = parse_qs(parts.query).get("password", [""])
            _PASSWORDS[hidden] = unquote(parts.password or "") or options[0]
    return hidden


def find_password(url: str) -> str | None:
    """The password of an address that `hide_password` returned."""
    return _PASSWORDS.get(url)


# The remedy for sums that cannot be resumed. Without stage=scan, fresh=true applies to the requested stage only.
START_OVER = "the same command with stage=scan fresh=true, which starts the scan over"


@dataclass
class StoreConfig:
    """Storage of the sums of an unfinished scan; explained in conf/store."""

    kind: str = field(default="local", metadata={"choices": ("local", "redis"), "fingerprint": False})
    checkpoint_every: float = field(default=30.0, metadata={"minimum": 0, "fingerprint": False})
    url: str | None = field(default=None, metadata={"needs": {"kind": "redis"}, "fingerprint": False})
    namespace: str | None = field(default=None, metadata={"needs": {"kind": "redis"}, "fingerprint": False})

    def __post_init__(self) -> None:
        """Remove the password, so that no output of the settings contains it."""
        if self.url:
            self.url = hide_password(self.url)
