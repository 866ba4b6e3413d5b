"""Settings of continued pretraining."""

from dataclasses import dataclass, field

VERSION = 1


@dataclass
class TrainConfig:
    """How the projected checkpoint is trained."""

    # Tokens trained on, all phases together; the text is read again, in another order, where it is shorter.
    tokens: int = field(default=2_000_000, metadata={"minimum": 1})
    # Share of the tokens in each phase. router: only routers learn; experts: routers and experts; all: everything.
    router_share: float = field(default=0.1, metadata={"minimum": 0, "maximum": 1})
    experts_share: float = field(default=0.9, metadata={"minimum": 0, "maximum": 1})
    all_share: float = field(default=0.0, metadata={"minimum": 0, "maximum": 1})
    # Peak learning rates (AdamW). That of the routers is of logits of standard deviation 1, and scales with theirs.
    router_rate: float = field(default=1e-3, metadata={"above": 0})
    expert_rate: float = field(default=3e-4, metadata={"minimum": 0})
    rest_rate: float = field(default=1e-4, metadata={"minimum": 0})
    # Share of a phase in which rates rise from 0, and what they end at, as a share of the peak.
    warmup_share: float = field(default=0.05, metadata={"minimum": 0, "maximum": 1})
    final_rate: float = field(default=0.1, metadata={"minimum": 0, "maximum": 1})
    weight_decay: float = field(default=0.0, metadata={"minimum": 0})
    # Gradients of a larger norm are scaled down to it.
    gradient_norm: float = field(default=1.0, metadata={"above": 0})
    # The loss: language_model · next-token loss + logits · KL of the dense model's predictions.
    language_model: float = field(default=1.0, metadata={"minimum": 0})
    logits: float = field(default=0.0, metadata={"minimum": 0})
    # Compute all experts for every token, so that a router learns also about those it did not choose (straight-through
    # estimator); the checkpoint's values are the same.
    straight_through: bool = False
    # Even load. auto: selection_bias where the architecture has one, else loss; loss adds balance_weight · load
    # balancing loss; selection_bias moves each expert's bias by bias_rate a step against its load.
    balance: str = field(default="auto", metadata={"choices": ("auto", "loss", "selection_bias", "none")})
    balance_weight: float = field(default=0.01, metadata={"minimum": 0})
    bias_rate: float = field(default=0.02, metadata={"minimum": 0})
    # Weight of the squared log-partition of the router's logits.
    z_weight: float = field(default=1e-4, metadata={"minimum": 0})
    # Standard deviation of a token's router logits at the end, where the checkpoint has less: that of parity carves
    # (near 0, constant gates) and of softmax gates (0.3) grows linearly over the first logit_std_share of the
    # tokens; a larger one (1, sigmoid gates) stays. 0 changes none.
    logit_std: float = field(default=0.5, metadata={"minimum": 0})
    logit_std_share: float = field(default=0.5, metadata={"above": 0, "maximum": 1})
    # Sequences per optimizer step, over all processes, and per forward pass of one process.
    batch: int = field(default=16, metadata={"minimum": 1, "maximum": 65536})
    micro_batch: int = field(default=8, metadata={"minimum": 1, "maximum": 65536, "fingerprint": False})
    # float32, or bfloat16: weights in float32, matrix products in bfloat16 (autocast).
    precision: str = field(default="float32", metadata={"choices": ("float32", "bfloat16")})
    # Recompute activations in the backward pass: less memory, a third more time.
    gradient_checkpointing: bool = field(default=False, metadata={"fingerprint": False})
    # Shard weights, gradients and optimizer over the processes of torchrun (FSDP), instead of a copy in each.
    fsdp: bool = field(default=False, metadata={"fingerprint": False})
    # JSON file of what transformers calls fsdp_config; null takes its defaults.
    fsdp_config: str | None = field(default=None, metadata={"fingerprint": False})
    # Monitor gradients and module outputs in every step; findings go to the log and to metrics.jsonl.
    watch: bool = field(default=True, metadata={"fingerprint": False})
    # Steps between two log lines, two evaluations on held-out text (0: only at the end of a phase), and two
    # checkpoints for resuming.
    log_steps: int = field(default=10, metadata={"minimum": 1, "fingerprint": False})
    heldout_steps: int = field(default=50, metadata={"minimum": 0, "fingerprint": False})
    save_steps: int = field(default=100, metadata={"minimum": 1, "fingerprint": False})
    # Sequences of held-out text per evaluation.
    heldout_sequences: int = field(default=64, metadata={"minimum": 1, "fingerprint": False})
    # TensorBoard events in addition to metrics.jsonl (pip install tensorboard).
    tensorboard: bool = field(default=True, metadata={"fingerprint": False})

    def unread(self) -> dict[str, str]:
        """Settings that nothing reads, and why."""
        return {} if self.fsdp else {"fsdp_config": "train.fsdp=false"}
