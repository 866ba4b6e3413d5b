"""Settings of stage=diagnose; explained in conf/diagnose."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from instruments.errors import ConfigError
from instruments.precision.verdict import DiffLimits
from instruments.training_watch.step_log import WatchConfig

VERSION = 1
CHECKS = ("auto_diff", "analyze_tensor", "watch")


@dataclass
class AutoDiffConfig:
    """Comparison of FP32 and low precision, module by module."""

    precision: str = field(default="bfloat16", metadata={"choices": ("bfloat16", "float16", "bf16", "fp16")})
    mode: str = field(default="autocast", metadata={"choices": ("autocast", "cast")})
    modules: list[str] = field(default_factory=lambda: ["*"])
    limits: DiffLimits = field(default_factory=DiffLimits)


@dataclass
class AnalyzeTensorConfig:
    """Rounding error of activations in low precision."""

    modules: list[str] = field(default_factory=lambda: ["*.down_proj"])
    formats: list[str] = field(
        default_factory=lambda: ["bfloat16", "float16"],
        metadata={"choices": ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "bf16", "fp16")},
    )
    scale: str = field(default="none", metadata={"choices": ("none", "amax")})


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
    watch: WatchStageConfig = field(default_factory=WatchStageConfig)

    def contradictions(self) -> Iterator[ConfigError]:
        """Errors: there is no checkpoint in the folder."""
        if self.checkpoint is not None and not (Path(self.checkpoint) / "config.json").is_file():
            what, where = f"{self.checkpoint} holds no config.json, so no checkpoint", "setting diagnose.checkpoint"
            do = "diagnose.checkpoint=null for the dense model, or a folder such as outputs/latest/checkpoint"
            yield ConfigError(what, where=where, do=do)
