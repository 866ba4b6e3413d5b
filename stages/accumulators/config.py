"""Settings of the accumulator."""

from dataclasses import dataclass, field

# The remedy of sums that cannot be gone on from. Without the stage, only the stage that is asked for starts over.
START_OVER = "the same command with stage=scan fresh=true, which starts the scan over"


@dataclass
class StoreConfig:
    """Where a running scan keeps its sums."""

    # local: a file in the folder of the unfinished result; redis: a server that many workers share.
    kind: str = field(default="local", metadata={"choices": ("local", "redis"), "fingerprint": False})
    # Seconds between flushes of a running scan; a killed scan goes on from the last one.
    checkpoint_every: float = field(default=30.0, metadata={"minimum": 0, "fingerprint": False})
    # kind=redis: redis://[user@]host:port/db, rediss:// for TLS. Unset: the environment's TINY_ONN_REDIS_URL. The
    # password may stand in the URL or, better, in TINY_ONN_REDIS_PASSWORD.
    url: str | None = field(default=None, metadata={"fingerprint": False})
    # kind=redis: what every key begins with; null stands for tiny_onn:<model label>:<fingerprint>:
    namespace: str | None = field(default=None, metadata={"fingerprint": False})

    def unread(self) -> dict[str, str]:
        """Settings that nothing reads, and why."""
        return {} if self.kind == "redis" else dict.fromkeys(("url", "namespace"), f"store.kind={self.kind}")
