"""An MoE of a given shape for timing: slices of the real FFN, and a router that spreads the tokens."""

from pathlib import Path

import torch

from models.checkpoint.shards import ShardReader
from models.config import MoEShape
from models.dense import dense_family
from models.emit import emit_checkpoint
from models.experts import slice_experts
from models.source import read_config
from models.targets.config import select_target
from pipeline.shape import ShapeRequest, resolve_shape


def shape_of(width: int, experts: int, active: float) -> MoEShape:
    """E experts of F // E neurons; always-on neurons and experts per token are resolved as for a carve."""
    return resolve_shape(ShapeRequest(experts, max(1, width // experts), None, None, active), width)


def write_moe(dense: Path, out: Path, shape: MoEShape, dtype: str) -> Path:
    """Emit the checkpoint.

    The partition does not affect speed, so experts get the neurons in order, again from the first if E·n exceeds their
    number. Random router rows load the experts about evenly.
    """
    config = read_config(dense)
    family = dense_family(config)
    neurons = torch.arange(int(config["intermediate_size"]))
    always_S, routed = neurons[: shape.always_on], neurons[shape.always_on :]
    slots = torch.arange(shape.experts * shape.n) % len(routed)
    neurons_EN = routed[slots].view(shape.experts, shape.n)
    generator = torch.Generator().manual_seed(0)
    with ShardReader(dense) as reader:
        emit_checkpoint(
            dense,
            out,
            target=select_target(config, "auto", shape.always_on),
            shape=shape,
            routers=lambda _layer: torch.randn(shape.experts, int(config["hidden_size"]), generator=generator),
            experts=lambda layer: slice_experts(reader, family, layer, neurons_EN, always_S),
            dtype=dtype,
        )
    return out
