"""Settings of the evaluation."""

from dataclasses import dataclass, field

VERSION = 1


@dataclass
class EvaluateConfig:
    """Which models are compared on held-out text."""

    # Beside the dense model and the carved one: unaligned (the carve before projection), static_mask, static_mask_aligned,
    # random_router, oracle, oracle_aligned.
    baselines: list[str] = field(
        default_factory=lambda: [
            "unaligned",
            "static_mask",
            "static_mask_aligned",
            "random_router",
            "oracle",
            "oracle_aligned",
        ]
    )
    # Tokens per forward batch.
    batch_tokens: int = 4096
    # Tokens timed for tokens/s, dense and carved in turn; 0 skips the timing.
    speed_tokens: int = 8192
