"""Settings of the projection: gradient projection, behaviour alignment, and the routers' second look."""

from dataclasses import dataclass, field

VERSION = 10


@dataclass
class ProjectConfig:
    """How the extracted experts are bent towards the dense model's behaviour."""

    # Gradient projection, after the alignment: W_small = W_base + sign·β·α·λ·∇W / (‖∇W‖₂ + ε) for every neuron of every
    # expert, always-on ones included. ∇W is the gradient of the carved model's distance from the dense one (KL of the
    # next-token distributions), through the routing; λ and what is kept are decided on validation tokens.
    gradient_projection: bool = True
    alpha: float = field(default=0.8, metadata={"above": 0})
    beta: float = field(default=0.3, metadata={"above": 0})
    # -1 goes down the gradient, 1 up it.
    sign: int = field(default=-1, metadata={"choices": (1, -1)})
    epsilon: float = field(default=1e-8, metadata={"above": 0})
    # Which of gate, up, down are projected.
    matrices: list[str] = field(
        default_factory=lambda: ["gate", "up", "down"], metadata={"choices": ("gate", "up", "down")}
    )
    # Calibration tokens whose gradient is taken, at most; each once.
    gradient_tokens: int = field(default=65536, metadata={"minimum": 1})
    # Tokens of one round: gradient, average with those before, step.
    round_tokens: int = field(default=512, metadata={"minimum": 1})
    # What alignment starts from: extracted (the dense slices) or random (seeded normal of the same standard deviation).
    base: str = field(default="extracted", metadata={"choices": ("extracted", "random")})
    # Behaviour alignment: ridge (closed form, down_proj) or none.
    alignment: str = field(default="ridge", metadata={"choices": ("ridge", "none")})
    # What down_proj is aligned to: local (the dense FFN on the carved model's own inputs) or residual (the dense
    # model's residual stream, which also corrects what earlier layers got wrong).
    alignment_target: str = field(default="local", metadata={"choices": ("local", "residual")})
    # Penalties tried, relative to the mean diagonal, each pulling to the extracted weights, from the largest down as
    # long as held-out tokens gain by it.
    penalties: list[float] = field(default_factory=lambda: [1e-3, 1e-2, 1e-1, 1.0, 10.0], metadata={"above": 0})
    # Rounds of fitting the router anew, to the aligned experts on the carved model's inputs, and aligning again; a
    # round that does not lower the held-out error ends them. Routers that are fitted to nothing (random, say) stay.
    rounds: int = field(default=1, metadata={"minimum": 0})
    # constant: gates stay as assemble.mode made them; fitted: larger spreads of the logits are tried, layer by layer,
    # and the columns aligned to what the gates then weigh; the best on held-out tokens stays.
    gates: str = field(default="constant", metadata={"choices": ("constant", "fitted")})
    # Steps, first learning rate and tokens of a trained router in these rounds.
    router_steps: int = field(default=200, metadata={"minimum": 0})
    router_rate: float = field(default=0.01, metadata={"above": 0})
    router_tokens: int = field(default=8192, metadata={"minimum": 1})
    # Steps of layer-wise gradient descent on gate, up and down after the alignment; 0 trains nothing.
    descent_steps: int = field(default=0, metadata={"minimum": 0})
    # Its learning rate at the first step, relative to the size of each matrix's weights; it falls linearly.
    descent_rate: float = field(default=0.01, metadata={"above": 0})
    # Tokens in one of its steps.
    descent_tokens: int = field(default=1024, metadata={"minimum": 1})
    # topology=global_pool: calibration tokens that the pool is aligned to and judged on, at most; 2·L·D numbers are
    # kept of each, and as many again while aligning.
    pool_tokens: int = field(default=8192, metadata={"minimum": 1, "fingerprint": "unless default"})
    # topology=global_pool: times that alignment goes over all experts, one at a time.
    pool_sweeps: int = field(default=2, metadata={"minimum": 1, "fingerprint": "unless default"})
    # Share of the calibration sequences held out to choose the penalty and to judge every step.
    guard_share: float = field(default=0.125, metadata={"above": 0, "maximum": 0.5})
    # Drop a step that makes validation tokens worse: of alignment layer by layer, of gradient projection as a whole.
    guard: bool = True
    # Tokens per forward batch.
    batch_tokens: int = field(default=4096, metadata={"minimum": 1})
