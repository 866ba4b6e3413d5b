"""What is dumped of a running model, and how; also by environment variables."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from instruments.errors import ConfigError

LINEAR, ATTENTION, EXPERTS = "linear", "attention", "experts"
FORWARD, BACKWARD = "forward", "backward"
# Tensors by the kind of module that has them; those of the backward pass begin with grad.
TENSORS = {
    LINEAR: ("input", "weight", "grad_output"),
    ATTENTION: ("query", "key", "value", "grad_query", "grad_key", "grad_value"),
    EXPERTS: ("input", "weight", "grad_output", "expert"),
}
ALL_TENSORS = (*TENSORS[LINEAR], *TENSORS[ATTENTION], "expert")
QUANT_TYPES = ("hifp8", "mxfp8", "mxfp4", "bf16", "fp16")


@dataclass
class DumpConfig:
    """Which tensors of which modules, steps, processes and tokens; where they wait, and what is kept of them."""

    # Modules, by glob on their names, as in ["*.layers.3.*", "*.q_proj"]; ["*"] takes every Linear, attention and
    # experts' layer.
    modules: list[str] = field(default_factory=lambda: ["*"], metadata={"nonempty": True})
    # What is kept. Of Linear layers: input, weight, grad_output; of attention, as its kernel gets them: query, key,
    # value, grad_query, grad_key, grad_value. Of the experts' fused layers also expert: which one each row goes to.
    tensors: list[str] = field(
        default_factory=lambda: list(ALL_TENSORS), metadata={"choices": ALL_TENSORS, "nonempty": True}
    )
    # Steps that are dumped: first_step, and every so many after it ...
    first_step: int = field(default=0, metadata={"minimum": 0})
    every_steps: int = field(default=1, metadata={"minimum": 1})
    # ... but no more than this many; null: no end.
    max_steps: int | None = field(default=None, metadata={"minimum": 1})
    # Processes that dump, by global rank; null: all.
    ranks: list[int] | None = field(default=None, metadata={"minimum": 0})
    # Token positions that are kept: first_token, and every so many after it ...
    first_token: int = field(default=0, metadata={"minimum": 0})
    every_tokens: int = field(default=1, metadata={"minimum": 1})
    # ... but no more than this many of a sequence; null: all.
    max_tokens: int | None = field(default=None, metadata={"minimum": 1})
    # Also keep what a layer computes again in the backward pass (gradient checkpointing), marked as such. Gradients
    # are kept once, whatever is said here.
    recomputed: bool = False
    # tensors: their bytes and statistics; statistics: shape, range, mean and deviation alone.
    keep: str = field(default="tensors", metadata={"choices": ("tensors", "statistics")})
    # Keep this many last steps in memory and write them only when a loss is not finite; null: write every step.
    last_steps: int | None = field(default=None, metadata={"minimum": 1})
    # MiB of host memory for tensors on their way to the disk; of a GPU, pinned.
    memory_mib: int = field(default=512, metadata={"minimum": 1})
    # When that memory is full: block (training waits), drop (the tensor is counted, not kept), statistics (only its
    # statistics are kept).
    when_full: str = field(default="block", metadata={"choices": ("block", "drop", "statistics")})
    # MiB after which a file is closed; what is in it counts from then on, whatever happens to the process.
    shard_mib: int = field(default=64, metadata={"minimum": 1})
    # The number format under study: hifp8, mxfp8, mxfp4, bf16 or fp16. What tensors really are is recorded beside it.
    quant_type: str | None = field(default=None, metadata={"choices": QUANT_TYPES})
    # Also store every tensor rounded into quant_type, with its error.
    fake_quant: bool = False


def contradictions(config: DumpConfig, prefix: str = "") -> Iterator[ConfigError]:
    """What is wrong; `prefix` stands before every setting's name."""
    if not config.fake_quant:
        return
    if config.quant_type is None:
        yield ConfigError(
            f"{prefix}fake_quant=true rounds into {prefix}quant_type, and there is none",
            where=f"settings {prefix}quant_type and {prefix}fake_quant",
            do=f"{prefix}quant_type=mxfp8, or {prefix}fake_quant=false",
        )
    if config.keep == "statistics":
        yield ConfigError(
            f"{prefix}fake_quant=true stores rounded tensors, and {prefix}keep=statistics stores none",
            where=f"settings {prefix}keep and {prefix}fake_quant",
            do=f"{prefix}keep=tensors, or {prefix}fake_quant=false",
        )
