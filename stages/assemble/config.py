"""Settings of the assembly."""

from dataclasses import dataclass, field

from models.targets.config import MOE_TARGETS
from stages.calibration.config import FITTED_ROUTERS, ROUTERS, TRAINED_ROUTERS, is_priced

VERSION = 8

TARGETS = ("auto", *MOE_TARGETS)


@dataclass
class AssembleConfig:
    """How experts and a router become a checkpoint."""

    # Target architecture: one of models/targets, such as qwen3_moe or mixtral; tiny_onn, the project's own class, for
    # what no other can express; or auto, the best that can hold the source's attention and the always-on neurons.
    target: str = field(default="auto", metadata={"choices": TARGETS})
    # residual_ridge: the ridge regression, on the FFN input, of the logarithm of what each expert adds beyond what the
    # always-on neurons predict of it, because alignment gives that much without routing; error: from there on by
    # gradient descent, as long as the output error falls on validation tokens (with topology=global_pool from
    # regressions of each expert's output norm and of its drop of the layer's error; residual_ridge is refused there);
    # random: seeded normal rows.
    router: str = field(default="error", metadata={"choices": ROUTERS})
    # Ridge penalty, relative to the mean diagonal of the input's second moment; of a pool, error tries a tenth and ten
    # times it, too.
    ridge_penalty: float = field(default=0.1, metadata={"above": 0})
    # Steps of a trained router; 0 leaves it as the regression made it (stage=project goes on, with the aligned
    # experts).
    router_steps: int = field(default=0, metadata={"minimum": 0})
    # Its learning rate at the first step; it falls linearly.
    router_rate: float = field(default=0.01, metadata={"above": 0})
    # Tokens it is trained on, and the regression is fitted on (of a pool: any router is fitted and judged on), at most;
    # a trained one keeps E² numbers of each.
    router_tokens: int = field(default=8192, metadata={"minimum": 1})
    # What a trained router pays for uneven load: this times the variance of the experts' load, added to the relative
    # error (0.01: variance 1 costs as much as one percent of error). The table shows what it costs in error.
    balance: float = field(default=0.0, metadata={"minimum": 0})
    # train: router logits of standard deviation logit_std, which low precision and training keep, and down columns
    # scaled to what the gates weigh; parity: logits shrunk so that gates are all but constant, for exactness.
    mode: str = field(default="train", metadata={"choices": ("train", "parity")})
    # Standard deviation over experts of the router's logits on the calibration text in train mode; null: 1 for gates
    # that are sigmoids, 0.3 for a softmax, which tells experts further apart (LOGIT_STD in models/routing.py).
    logit_std: float | None = field(default=None, metadata={"above": 0})
    # Spread (standard deviation) of the router's logits on the calibration text in parity mode; 0 makes gates exactly
    # constant and the choice of experts meaningless, which is right when all are chosen.
    parity_logit_std: float = field(default=0.001, metadata={"minimum": 0})
    # Experts are filled up with zero neurons to a multiple of this; kernels want 8 (grouped_mm), 32 (llama.cpp's Q8_0
    # and Q4_0, vLLM on a CPU), 128 (vLLM, SGLang) or 256 (llama.cpp's K-quants). null: 32 where that adds at most an
    # eighth, else 8.
    pad_to: int | None = field(default=None, metadata={"minimum": 1, "maximum": 4096})
    # Tokens per forward batch while calibrating the router.
    batch_tokens: int = field(default=4096, metadata={"minimum": 1})
    # Number format of the checkpoint: source (as the dense one), float32, bfloat16, float16.
    dtype: str = field(default="source", metadata={"choices": ("source", "float32", "bfloat16", "float16")})

    def load_price(self, *, pooled: bool) -> float:
        """What the routers of this stage and of stage=project pay for uneven load."""
        return self.balance if is_priced(self.router, pooled=pooled) else 0.0

    def unread(self, *, pooled: bool) -> dict[str, str]:
        """Settings that nothing reads, and why."""
        found, router = {}, f"assemble.router={self.router}"
        if self.router not in FITTED_ROUTERS:
            found["ridge_penalty"] = router
        if self.router not in TRAINED_ROUTERS:
            found |= dict.fromkeys(("router_steps", "router_rate"), router)
        elif not self.router_steps:
            found["router_rate"] = "assemble.router_steps=0"
        if self.router not in FITTED_ROUTERS and not pooled:
            found["router_tokens"] = router
        if not is_priced(self.router, pooled=pooled):
            found["balance"] = "topology=global_pool" if pooled else router
        found["parity_logit_std" if self.mode == "train" else "logit_std"] = f"assemble.mode={self.mode}"
        return found
