"""Settings of the checks of numerical health."""

from dataclasses import dataclass, field

VERSION = 1
CHECKS = ("auto_diff",)


@dataclass
class AutoDiffConfig:
    """FP32 against low precision, module by module."""

    # The low precision: bfloat16 or float16.
    precision: str = field(default="bfloat16", metadata={"choices": ("bfloat16", "float16")})
    # autocast: fp32 weights under torch.autocast; cast: the weights loaded in the low precision, too.
    mode: str = field(default="autocast", metadata={"choices": ("autocast", "cast")})
    # Modules that are compared, by glob on their names, as in ["*.layers.3.*"].
    modules: list[str] = field(default_factory=lambda: ["*"])
    # MiB of host memory for outputs that wait to be compared; where they need more, the model runs several times.
    memory_mib: int = field(default=2048, metadata={"minimum": 1})


@dataclass
class DiagnoseConfig:
    """What is looked at; below it, a node for each check."""

    # Folder of a checkpoint, such as outputs/latest/checkpoint; null: the dense model of `model`.
    checkpoint: str | None = None
    # Tokens of calibration text that the model reads.
    tokens: int = field(default=64, metadata={"minimum": 2})
    auto_diff: AutoDiffConfig = field(default_factory=AutoDiffConfig)
