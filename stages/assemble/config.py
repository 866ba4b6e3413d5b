"""Settings of the assembly."""

from dataclasses import dataclass

VERSION = 1


@dataclass
class AssembleConfig:
    """How experts and a router become a checkpoint."""

    # Target architecture: auto (the source's own family where it can say the shape), qwen3_moe, qwen2_moe, mixtral, glm4_moe.
    target: str = "auto"
    # ridge: regress each expert's contribution on the FFN input; centroid: mean input of the tokens an expert serves best;
    # random: seeded normal rows, the plain control.
    router: str = "ridge"
    # Ridge penalty, relative to the mean diagonal of the input's second moment.
    ridge_penalty: float = 1e-3
    # parity: router logits shrunk so that gates are all but constant; train: logits of unit spread, ready to learn.
    mode: str = "parity"
    # Spread (standard deviation) of the router's logits on the calibration text in parity mode.
    parity_spread: float = 0.001
    # Tokens per forward batch while calibrating the router.
    batch_tokens: int = 4096
    # Number format of the checkpoint: source (as the dense one), float32, bfloat16, float16.
    dtype: str = "source"
