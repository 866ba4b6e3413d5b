"""Settings of the accumulator."""

from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

from instruments.errors import redact

# Address without its password → the password; in this process alone.
_PASSWORDS: dict[str, str] = {}


def hide_password(url: str) -> str:
    """The address without its password, which `find_password` still knows."""
    hidden = redact(url)
    if hidden != url:
        with suppress(ValueError):  # no address: said where it is used
            parts = urlsplit(url)
            options = parse_qs(parts.query).get("password", [""])
            _PASSWORDS[hidden] = unquote(parts.password or "") or options[0]
    return hidden


def find_password(url: str) -> str | None:
    """The password that an address was given with."""
    return _PASSWORDS.get(url)


# The remedy of sums that cannot be gone on from. Without the stage, only the stage that is asked for starts over.
START_OVER = "the same command with stage=scan fresh=true, which starts the scan over"


@dataclass
class StoreConfig:
    """Where a running scan keeps its sums; explained in conf/store."""

    kind: str = field(default="local", metadata={"choices": ("local", "redis"), "fingerprint": False})
    checkpoint_every: float = field(default=30.0, metadata={"minimum": 0, "fingerprint": False})
    url: str | None = field(default=None, metadata={"fingerprint": False})
    namespace: str | None = field(default=None, metadata={"fingerprint": False})

    def __post_init__(self) -> None:
        """Keep a password out of everything that writes settings."""
        if self.url:
            self.url = hide_password(self.url)

    def unread(self) -> dict[str, str]:
        """Settings that nothing reads, and why."""
        return {} if self.kind == "redis" else dict.fromkeys(("url", "namespace"), f"store.kind={self.kind}")
