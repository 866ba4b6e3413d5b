"""Settings of the assembly."""

from dataclasses import dataclass, field

from models.targets.config import MOE_TARGETS

VERSION = 20

TARGETS = ("auto", *MOE_TARGETS)


@dataclass
class AssembleConfig:
    """How routers are fitted and the checkpoint is written; explained in conf/assemble."""

    target: str = field(default="auto", metadata={"choices": TARGETS})
    router: str = field(default="error", metadata={"choices": ("error", "random")})
    ridge_penalty: float = field(default=0.1, metadata={"needs": {"router": "error"}, "above": 0})
    router_steps: int = field(default=0, metadata={"needs": {"router": "error"}, "minimum": 0})
    router_tokens: int = field(default=8192, metadata={"minimum": 1})
    balance: float = field(default=0.0, metadata={"needs": {"router": "error"}, "minimum": 0})
    logit_std: float | None = field(default=None, metadata={"minimum": 0})
    pad_to: int | None = field(default=None, metadata={"minimum": 1, "maximum": 4096})
    text_only: bool = False
    tied_embeddings: bool = True
    dtype: str = field(default="source", metadata={"choices": ("source", "float32", "bfloat16", "float16")})

    def balance_weight(self, *, pooled: bool) -> float:
        """Weight of uneven load in the objective of the routers, here and in stage=project; 0 in a pool.

        No layer of a pool should use all experts evenly.
        """
        return 0.0 if pooled or self.router == "random" else self.balance
