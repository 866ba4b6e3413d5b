"""Settings of the projection: behaviour alignment, router refits, layer-wise descent and gradient projection."""

from dataclasses import dataclass, field

VERSION = 28


@dataclass
class ProjectConfig:
    """How the extracted experts are fitted to the dense model's behaviour; explained in conf/project."""

    gradient_projection: bool = True
    alpha: float = field(default=0.8, metadata={"needs": {"gradient_projection": True}, "above": 0})
    beta: float = field(default=0.3, metadata={"needs": {"gradient_projection": True}, "above": 0})
    sign: int = field(default=-1, metadata={"needs": {"gradient_projection": True}, "choices": (1, -1)})
    epsilon: float = field(default=1e-8, metadata={"needs": {"gradient_projection": True}, "above": 0})
    gradient_tokens: int = field(default=196608, metadata={"needs": {"gradient_projection": True}, "minimum": 1})
    round_tokens: int = field(default=512, metadata={"needs": {"gradient_projection": True}, "minimum": 1})
    gradient_checkpointing: bool = field(
        default=False, metadata={"needs": {"gradient_projection": True}, "fingerprint": False}
    )
    alignment: str = field(default="ridge", metadata={"choices": ("ridge", "none")})
    penalties: list[float] = field(
        default_factory=lambda: [1e-3, 1e-2, 1e-1, 1.0, 10.0], metadata={"above": 0, "nonempty": True}
    )
    rounds: int = field(default=1, metadata={"needs": {"alignment": "ridge"}, "minimum": 0})
    refit_tokens: int = field(default=16384, metadata={"needs": {"alignment": "ridge", "rounds": True}, "minimum": 1})
    router_steps: int = field(default=200, metadata={"needs": {"alignment": "ridge", "rounds": True}, "minimum": 0})
    descent_steps: int = field(default=400, metadata={"minimum": 0})
    descent_tokens: int = field(default=1024, metadata={"needs": {"descent_steps": True}, "minimum": 1})
    pool_tokens: int = field(default=8192, metadata={"minimum": 1})
    validation_share: float = field(default=0.125, metadata={"above": 0, "maximum": 0.5})
    validate: bool = True
