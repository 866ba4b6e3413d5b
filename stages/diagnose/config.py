"""Settings of the checks of numerical health."""

from dataclasses import dataclass, field

from instruments.precision.verdict import DiffLimits
from instruments.training_watch.step_log import WatchConfig

VERSION = 1
CHECKS = ("auto_diff", "analyze_tensor", "static_check", "watch")


@dataclass
class AutoDiffConfig:
    """FP32 against low precision, module by module."""

    # The low precision: bfloat16 or float16.
    precision: str = field(default="bfloat16", metadata={"choices": ("bfloat16", "float16", "bf16", "fp16")})
    # autocast: fp32 weights under torch.autocast; cast: the weights loaded in the low precision, too.
    mode: str = field(default="autocast", metadata={"choices": ("autocast", "cast")})
    # Modules that are compared, by glob on their names, as in ["*.layers.3.*"].
    modules: list[str] = field(default_factory=lambda: ["*"])
    # MiB of host memory for outputs that wait to be compared; where they need more, the model runs several times.
    memory_mib: int = field(default=2048, metadata={"minimum": 1})
    # What errors are held to.
    limits: DiffLimits = field(default_factory=DiffLimits)


@dataclass
class AnalyzeTensorConfig:
    """What a tensor would lose."""

    # A .safetensors or .pt file of tensors; null: activations of the model.
    file: str | None = None
    # Of a file, which tensors, by glob on their names.
    tensors: list[str] = field(default_factory=lambda: ["*"])
    # Of the model, outputs of which modules, by glob on their names, as in ["*.layers.3.mlp.down_proj"].
    modules: list[str] = field(default_factory=lambda: ["*.down_proj"])
    # The formats: bfloat16, float16, float8_e4m3fn, float8_e5m2.
    formats: list[str] = field(
        default_factory=lambda: ["bfloat16", "float16"],
        metadata={"choices": ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "bf16", "fp16")},
    )
    # none, or amax: each tensor is scaled first, so that its largest value becomes the format's.
    scale: str = field(default="none", metadata={"choices": ("none", "amax")})


@dataclass
class StaticCheckConfig:
    """Training code, read and not run."""

    # Files, or folders whose *.py are checked.
    paths: list[str] = field(default_factory=lambda: ["."])
    # Device of autocast where a file does not say.
    device: str = "cuda"


@dataclass
class WatchStageConfig:
    """Forward and backward passes, watched; weights stay as they are."""

    # Passes, each over one sequence of calibration text, cut to `tokens`.
    steps: int = field(default=8, metadata={"minimum": 1})
    # float32; or the type of autocast: bfloat16, or float16 with a GradScaler.
    precision: str = field(
        default="bfloat16", metadata={"choices": ("float32", "bfloat16", "float16", "fp32", "bf16", "fp16")}
    )
    # What gradients, outputs and the loss scale are held to.
    limits: WatchConfig = field(default_factory=WatchConfig)


@dataclass
class DiagnoseConfig:
    """What is looked at; below it, a node for each check."""

    # Folder of a checkpoint, such as outputs/latest/checkpoint; null: the dense model of `model`.
    checkpoint: str | None = None
    # Tokens of calibration text that the model reads.
    tokens: int = field(default=64, metadata={"minimum": 2})
    auto_diff: AutoDiffConfig = field(default_factory=AutoDiffConfig)
    analyze_tensor: AnalyzeTensorConfig = field(default_factory=AnalyzeTensorConfig)
    static_check: StaticCheckConfig = field(default_factory=StaticCheckConfig)
    watch: WatchStageConfig = field(default_factory=WatchStageConfig)
