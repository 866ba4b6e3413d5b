"""Settings of stage=diagnose; explained in conf/diagnose."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from instruments.errors import ConfigError
from instruments.precision.verdict import DiffLimits

VERSION = 1
CHECKS = ("auto_diff", "analyze_tensor")


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
class DiagnoseConfig:
    """The model and text, and settings for each check."""

    checkpoint: str | None = None
    tokens: int = field(default=64, metadata={"minimum": 2})
    auto_diff: AutoDiffConfig = field(default_factory=AutoDiffConfig)
    analyze_tensor: AnalyzeTensorConfig = field(default_factory=AnalyzeTensorConfig)

    def contradictions(self) -> Iterator[ConfigError]:
        """Errors: there is no checkpoint in the folder."""
        if self.checkpoint is not None and not (Path(self.checkpoint) / "config.json").is_file():
            what, where = f"{self.checkpoint} holds no config.json, so no checkpoint", "setting diagnose.checkpoint"
            do = "diagnose.checkpoint=null for the dense model, or a folder such as outputs/latest/checkpoint"
            yield ConfigError(what, where=where, do=do)
