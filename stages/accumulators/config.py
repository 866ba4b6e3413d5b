"""Settings of the accumulator."""

from dataclasses import dataclass, field

# The remedy for sums that cannot be resumed. Without stage=scan, fresh=true applies to the requested stage only.
START_OVER = "the same command with stage=scan fresh=true, which starts the scan over"


@dataclass
class StoreConfig:
    """Storage of the sums of an unfinished scan; explained in conf/store."""

    kind: str = field(default="local", metadata={"choices": ("local", "redis"), "fingerprint": False})
    checkpoint_every: float = field(default=30.0, metadata={"minimum": 0, "fingerprint": False})
    url: str | None = field(default=None, metadata={"needs": {"kind": "redis"}, "fingerprint": False})
    namespace: str | None = field(default=None, metadata={"needs": {"kind": "redis"}, "fingerprint": False})
