"""Settings of stage=diagnose; explained in conf/diagnose."""

from dataclasses import dataclass, field

from instruments.precision.verdict import DiffLimits
from instruments.training_watch.step_log import WatchConfig

VERSION = 1
CHECKS = ("auto_diff", "analyze_tensor", "static_check", "watch")


@dataclass
class AutoDiffConfig:
    """Comparison of FP32 and low precision, module by module."""

    precision: str = field(default="bfloat16", metadata={"choices": ("bfloat16", "float16", "bf16", "fp16")})
    mode: str = field(default="autocast", metadata={"choices": ("autocast", "cast")})
    modules: list[str] = field(default_factory=lambda: ["*"])
    limits: DiffLimits = field(default_factory=DiffLimits)


@dataclass
class AnalyzeTensorConfig:
    """Rounding error of tensors in low precision."""

    file: str | None = None
    tensors: list[str] = field(default_factory=lambda: ["*"], metadata={"needs": {"file": True}})
    modules: list[str] = field(default_factory=lambda: ["*.down_proj"], metadata={"needs": {"file": None}})
    formats: list[str] = field(
        default_factory=lambda: ["bfloat16", "float16"],
        metadata={"choices": ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "bf16", "fp16")},
    )
    scale: str = field(default="none", metadata={"choices": ("none", "amax")})


@dataclass
class StaticCheckConfig:
    """Static check of training code."""

    paths: list[str] = field(default_factory=lambda: ["."])
    device: str = "cuda"


@dataclass
class WatchStageConfig:
    """Monitored forward and backward passes; weights do not change."""

    steps: int = field(default=8, metadata={"minimum": 1})
    precision: str = field(
        default="bfloat16", metadata={"choices": ("float32", "bfloat16", "float16", "fp32", "bf16", "fp16")}
    )
    limits: WatchConfig = field(default_factory=WatchConfig)


@dataclass
class DiagnoseConfig:
    """The model and text, and settings for each check."""

    checkpoint: str | None = None
    tokens: int = field(default=64, metadata={"minimum": 2})
    auto_diff: AutoDiffConfig = field(default_factory=AutoDiffConfig)
    analyze_tensor: AnalyzeTensorConfig = field(default_factory=AnalyzeTensorConfig)
    static_check: StaticCheckConfig = field(default_factory=StaticCheckConfig)
    watch: WatchStageConfig = field(default_factory=WatchStageConfig)
