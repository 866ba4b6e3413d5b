"""Settings of a dump that contradict each other."""

from collections.abc import Iterator

from models.dump.config import DumpConfig
from models.errors import ConfigError


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
