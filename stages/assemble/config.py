"""Settings of the assembly."""

from dataclasses import dataclass, field

from models.config import MoEShape
from models.targets.config import MOE_TARGETS
from stages.calibration.config import FITTED_ROUTERS, ROUTERS, is_priced, unread_of_descent

VERSION = 11

TARGETS = ("auto", *MOE_TARGETS)


@dataclass
class AssembleConfig:
    """How routers are fitted and the checkpoint is written; explained in conf/assemble."""

    target: str = field(default="auto", metadata={"choices": TARGETS})
    router: str = field(default="error", metadata={"choices": ROUTERS})
    ridge_penalty: float = field(default=0.1, metadata={"above": 0})
    router_steps: int = field(default=0, metadata={"minimum": 0})
    router_rate: float = field(default=0.01, metadata={"above": 0})
    router_tokens: int = field(default=8192, metadata={"minimum": 1})
    balance: float = field(default=0.0, metadata={"minimum": 0})
    mode: str = field(default="train", metadata={"choices": ("train", "parity")})
    logit_std: float | None = field(default=None, metadata={"above": 0})
    parity_logit_std: float = field(default=0.001, metadata={"minimum": 0})
    pad_to: int | None = field(default=None, metadata={"minimum": 1, "maximum": 4096})
    batch_tokens: int = field(default=4096, metadata={"minimum": 1})
    dtype: str = field(default="source", metadata={"choices": ("source", "float32", "bfloat16", "float16")})

    def balance_weight(self, *, pooled: bool) -> float:
        """Weight of uneven load in the objective of the routers, here and in stage=project."""
        return self.balance if is_priced(self.router, pooled=pooled) else 0.0

    def unread(self, shape: MoEShape, *, refits: bool = True) -> dict[str, str]:
        """Settings without effect → the reason; `refits`: stage=project fits the routers again."""
        found, router, pooled = {}, f"assemble.router={self.router}", shape.pooled
        if self.router not in FITTED_ROUTERS:
            found["ridge_penalty"] = router
        found |= unread_of_descent(self.router, self.router_steps, "assemble")
        if self.router not in FITTED_ROUTERS and not pooled:
            found["router_tokens"] = router
        if not is_priced(self.router, pooled=pooled):
            found["balance"] = "topology=global_pool" if pooled else router
        elif not (self.router_steps or refits):
            found["balance"] = "assemble.router_steps=0, and stage=project fits no router again"
        if shape.top_k == shape.experts:
            found = dict.fromkeys(("router_steps", "router_rate", "balance"), "a token is sent to all experts") | found
        found["parity_logit_std" if self.mode == "train" else "logit_std"] = f"assemble.mode={self.mode}"
        return found
