"""Settings of the assembly."""

from dataclasses import dataclass, field

VERSION = 1


@dataclass
class AssembleConfig:
    """How experts and a router become a checkpoint."""

    # Target architecture: auto (the source's own family where it can say the shape), qwen3_moe, qwen2_moe, mixtral or
    # glm4_moe.
    target: str = field(default="auto", metadata={"choices": ("auto", "qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe")})
    # ridge: regress each expert's contribution on the FFN input; centroid: mean input of the tokens an expert serves
    # best; random: seeded normal rows, the plain control.
    router: str = field(default="ridge", metadata={"choices": ("ridge", "centroid", "random")})
    # Ridge penalty, relative to the mean diagonal of the input's second moment.
    ridge_penalty: float = field(default=1e-3, metadata={"above": 0})
    # parity: router logits shrunk so that gates are all but constant; train: logits of unit spread, ready to learn.
    mode: str = field(default="parity", metadata={"choices": ("parity", "train")})
    # Spread (standard deviation) of the router's logits on the calibration text in parity mode; 0 makes gates exactly
    # constant and the choice of experts meaningless, which is right when all are chosen.
    parity_spread: float = field(default=0.001, metadata={"minimum": 0})
    # Tokens per forward batch while calibrating the router.
    batch_tokens: int = field(default=4096, metadata={"minimum": 1})
    # Number format of the checkpoint: source (as the dense one), float32, bfloat16, float16.
    dtype: str = field(default="source", metadata={"choices": ("source", "float32", "bfloat16", "float16")})
