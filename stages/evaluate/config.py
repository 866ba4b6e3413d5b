"""Settings of the evaluation."""

from dataclasses import dataclass, field

VERSION = 5

BASELINES = (
    "unaligned",
    "static_mask",
    "static_mask_aligned",
    "best_mask_aligned",
    "random_router",
    "random_router_aligned",
    "oracle",
    "oracle_aligned",
)


@dataclass
class EvaluateConfig:
    """Which models are compared on held-out text, and how; explained in conf/evaluate."""

    checkpoint: str = field(default="project", metadata={"choices": ("project", "train")})
    baselines: list[str] = field(
        default_factory=lambda: [
            "unaligned",
            "static_mask",
            "static_mask_aligned",
            "random_router",
            "oracle",
        ],
        metadata={"choices": BASELINES},
    )
    batch_tokens: int = field(default=4096, metadata={"minimum": 1})
    speed_tokens: int = field(default=8192, metadata={"minimum": 0})
    layer_tokens: int = field(default=0, metadata={"minimum": 0})
