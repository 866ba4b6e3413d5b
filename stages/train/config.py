"""Settings of continued pretraining."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from instruments.errors import ConfigError
from stages.text.config import DataConfig, SourceConfig, TrainingData

VERSION = 8


@dataclass
class TrainConfig:
    """Settings of continued pretraining; explained in conf/train."""

    tokens: int = field(default=2_000_000, metadata={"minimum": 1})
    sources: list[SourceConfig] = field(default_factory=list)
    router_share: float = field(default=0.1, metadata={"minimum": 0, "maximum": 1})
    all_share: float = field(default=0.0, metadata={"minimum": 0, "maximum": 1})
    router_rate: float = field(default=1e-3, metadata={"above": 0})
    expert_rate: float = field(default=3e-4, metadata={"minimum": 0})
    rest_rate: float = field(default=1e-4, metadata={"needs": {"all_share": True}, "minimum": 0})
    warmup_share: float = field(default=0.05, metadata={"minimum": 0, "maximum": 1})
    decay_share: float = field(default=1.0, metadata={"minimum": 0, "maximum": 1})
    final_rate: float = field(default=0.1, metadata={"needs": {"decay_share": True}, "minimum": 0, "maximum": 1})
    weight_decay: float = field(default=0.0, metadata={"minimum": 0})
    gradient_norm: float = field(default=1.0, metadata={"above": 0})
    language_model: float = field(default=1.0, metadata={"minimum": 0})
    logits: float = field(default=0.0, metadata={"minimum": 0})
    straight_through: bool = False
    balance: str = field(default="auto", metadata={"choices": ("auto", "loss", "none")})
    balance_weight: float = field(default=0.01, metadata={"needs": {"balance": ("auto", "loss")}, "minimum": 0})
    bias_rate: float = field(default=0.02, metadata={"needs": {"balance": "auto"}, "minimum": 0})
    z_weight: float = field(default=1e-4, metadata={"minimum": 0})
    sticky_weight: float = field(default=0.0, metadata={"minimum": 0})
    batch: int = field(default=16, metadata={"minimum": 1, "maximum": 65536})
    micro_batch: int = field(default=8, metadata={"minimum": 1, "maximum": 65536, "fingerprint": False})
    precision: str = field(default="float32", metadata={"choices": ("float32", "bfloat16")})
    gradient_checkpointing: bool = field(default=False, metadata={"fingerprint": False})
    fsdp: bool = field(default=False, metadata={"fingerprint": False})
    watch: bool = field(default=True, metadata={"fingerprint": False})
    log_steps: int = field(default=10, metadata={"minimum": 1, "fingerprint": False})
    heldout_steps: int = field(default=50, metadata={"minimum": 0, "fingerprint": False})
    save_steps: int = field(default=100, metadata={"minimum": 1, "fingerprint": False})
    heldout_sequences: int = field(default=64, metadata={"minimum": 1, "fingerprint": False})
    tensorboard: bool = field(default=True, metadata={"fingerprint": False})

    def own_text(self, data: DataConfig) -> TrainingData | None:
        """`sources`, with all other settings as in `data`; None: there are none."""
        own = vars(data) | {"kind": "mixture", "sources": self.sources}
        return TrainingData(**own) if self.sources else None

    @property
    def experts_share(self) -> float:
        """Share of the tokens for routers and experts, between the two other phases."""
        return round(1 - self.router_share - self.all_share, 9)

    def contradictions(self, workers: int) -> Iterator[ConfigError]:
        """Errors: shares beyond 1, no loss, shards of one process, or an indivisible batch."""
        if self.experts_share < 0:
            what = f"the phases' shares add up to {self.router_share + self.all_share:g}, more than 1"
            where = "settings train.router_share and train.all_share"
            yield ConfigError(what, where=where, do=f"train.router_share={1 - self.all_share:g}")
        if not (self.language_model or self.logits):
            what = "nothing is minimised: the weights of both losses are 0"
            where = "settings train.language_model and train.logits"
            yield ConfigError(what, where=where, do="train.language_model=1")
        if self.fsdp and workers == 1:
            what = "train.fsdp=true shards the model over processes, but there is only one"
            do = "train.fsdp=false, or torchrun --nproc-per-node=2 -m pipeline"
            yield ConfigError(what, where="setting train.fsdp", do=do)
        at_once = self.micro_batch * workers
        if self.batch > 0 < at_once and self.batch % at_once:
            what = f"train.batch={self.batch} is no multiple of train.micro_batch x {workers} processes, {at_once}"
            do = f"train.batch={at_once * max(1, round(self.batch / at_once))}"
            if self.batch < at_once:
                each = max(1, round(self.batch / workers))
                less = f" train.batch={each * workers}" * (each * workers != self.batch)
                do = f"train.micro_batch={each}{less}, or {do}"
            yield ConfigError(what, where="settings train.batch and train.micro_batch", do=do)
