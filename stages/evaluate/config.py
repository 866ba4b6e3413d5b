"""Settings of the evaluation."""

from dataclasses import dataclass, field

VERSION = 4

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
    """Which models are compared on held-out text."""

    # Whose checkpoint is looked at: project, or train, which is then run first.
    checkpoint: str = field(default="project", metadata={"choices": ("project", "train")})
    # Compared in addition to the dense model and the carved one: unaligned (the carve before projection), static_mask,
    # static_mask_aligned, random_router, oracle (the output oracle: the experts of largest output norm). Each that is
    # aligned takes about as long as all others together, so these are left to be asked for: oracle_aligned,
    # best_mask_aligned, random_router_aligned.
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
    # Tokens per forward batch.
    batch_tokens: int = field(default=4096, metadata={"minimum": 1})
    # Tokens timed for tokens/s, dense and carved in turn; 0 skips the timing.
    speed_tokens: int = field(default=8192, metadata={"minimum": 0})
    # Calibration tokens on which each layer in turn is put back to its dense FFN, to tell what its carve costs; 0 skips
    # it. Takes a forward pass of the carved model over them for every layer.
    layer_tokens: int = field(default=0, metadata={"minimum": 0})
