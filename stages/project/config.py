"""Settings of the projection: behaviour alignment, router refits, layer-wise descent and gradient projection."""

from dataclasses import dataclass, field

from models.config import MoEShape
from stages.calibration.config import FITTED_ROUTERS, unread_of_descent

VERSION = 19

REFIT_FIELDS = ("refit_tokens", "router_steps", "router_rate", "router_tokens")


@dataclass
class ProjectConfig:
    """How the extracted experts are fitted to the dense model's behaviour; explained in conf/project."""

    gradient_projection: bool = True
    alpha: float = field(default=0.8, metadata={"above": 0})
    beta: float = field(default=0.3, metadata={"above": 0})
    sign: int = field(default=-1, metadata={"choices": (1, -1)})
    epsilon: float = field(default=1e-8, metadata={"above": 0})
    matrices: list[str] = field(
        default_factory=lambda: ["gate", "up", "down"], metadata={"choices": ("gate", "up", "down"), "nonempty": True}
    )
    gradient_tokens: int = field(default=65536, metadata={"minimum": 1})
    round_tokens: int = field(default=256, metadata={"minimum": 1})
    alignment: str = field(default="ridge", metadata={"choices": ("ridge", "none")})
    penalties: list[float] = field(
        default_factory=lambda: [1e-3, 1e-2, 1e-1, 1.0, 10.0], metadata={"above": 0, "nonempty": True}
    )
    rounds: int = field(default=1, metadata={"minimum": 0})
    refit_tokens: int = field(default=16384, metadata={"minimum": 1})
    router_steps: int = field(default=200, metadata={"minimum": 0})
    router_rate: float = field(default=0.01, metadata={"above": 0})
    router_tokens: int = field(default=8192, metadata={"minimum": 1})
    descent_steps: int = field(default=400, metadata={"minimum": 0})
    descent_rate: float = field(default=0.01, metadata={"above": 0})
    descent_tokens: int = field(default=1024, metadata={"minimum": 1})
    pool_tokens: int = field(default=8192, metadata={"minimum": 1})
    pool_sweeps: int = field(default=2, metadata={"minimum": 1})
    validation_share: float = field(default=0.125, metadata={"above": 0, "maximum": 0.5})
    validate: bool = True
    batch_tokens: int = field(default=4096, metadata={"minimum": 1})

    def unread(self, shape: MoEShape, router: str) -> dict[str, str]:
        """Settings without effect → the reason; `router` is `assemble.router`."""
        found: dict[str, str] = {}
        if not self.gradient_projection:
            names = ("alpha", "beta", "sign", "epsilon", "matrices", "gradient_tokens", "round_tokens")
            found |= dict.fromkeys(names, "project.gradient_projection=false")
        if not self.descent_steps:
            found |= dict.fromkeys(("descent_rate", "descent_tokens"), "project.descent_steps=0")
        if shape.pooled:
            found |= dict.fromkeys(("descent_steps", "descent_rate", "descent_tokens"), "topology=global_pool")
            found["refit_tokens"] = "topology=global_pool"  # its rounds read the pool_tokens
        else:
            found |= dict.fromkeys(("pool_tokens", "pool_sweeps"), f"topology={shape.topology}")
        # In the order in which stages/project/layer_pass.py reads them.
        if self.alignment == "none":
            found |= dict.fromkeys(("rounds", "pool_sweeps", *REFIT_FIELDS), "project.alignment=none")
        elif router not in FITTED_ROUTERS:
            found |= dict.fromkeys(("rounds", *REFIT_FIELDS), f"assemble.router={router}")
        elif shape.top_k == shape.experts:
            found |= dict.fromkeys(("rounds", *REFIT_FIELDS), "a token is sent to all experts")
        elif not self.rounds:
            found |= dict.fromkeys(REFIT_FIELDS, "project.rounds=0")
        else:
            found |= unread_of_descent(router, self.router_steps, "project")
        return found

    def refits(self, shape: MoEShape, router: str) -> bool:
        """Whether the routers are fitted again; `router` is `assemble.router`."""
        return self.rounds > 0 and "rounds" not in self.unread(shape, router)
