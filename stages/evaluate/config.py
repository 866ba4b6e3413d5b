"""Settings of the evaluation."""

from dataclasses import dataclass, field

VERSION = 12

BASELINES = {  # name → row of the table
    "unaligned": "this MoE before projection, gates of 1",
    "static_mask": "static mask of the same width",
    "static_mask_aligned": "static mask, down columns aligned",
    "random_router": "random router, weights as cut",
    "random_router_aligned": "random router, aligned to its own routing",
    "cmoe": "CMoE (arXiv:2502.04416)",
    "cmoe_aligned": "CMoE, down columns aligned",
    "oracle": "output oracle, weights as cut",
    "oracle_aligned": "output oracle, aligned",
}
# Baselines of a pool; the others choose among one layer's neurons.
POOL_BASELINES = frozenset({"unaligned"})


@dataclass
class EvaluateConfig:
    """Which models are compared on held-out text, and how; explained in conf/evaluate."""

    checkpoint: str = field(default="project", metadata={"choices": ("project", "train")})
    baselines: list[str] = field(
        default_factory=lambda: ["unaligned", "static_mask", "static_mask_aligned", "random_router", "cmoe"],
        metadata={"choices": (*BASELINES,)},
    )
    batch_tokens: int = field(default=4096, metadata={"minimum": 1})
    speed_tokens: int = field(default=8192, metadata={"minimum": 0})
    samples: int = field(default=3, metadata={"minimum": 0})
