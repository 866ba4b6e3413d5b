"""The checkpoint of a carve, from the contracts of its stages."""

from collections.abc import Callable
from pathlib import Path

from models.experts import LayerExperts
from models.families.emit import emit_checkpoint
from models.families.moe import MOE_TARGETS
from models.shape import Shape
from stages.contracts.routers import Routers


def emit_carve(
    source_folder: Path, checkpoint: Path, shape: Shape, routers: Routers, experts: Callable[[int], LayerExperts]
) -> None:
    """Write the checkpoint that the routers were made for; arguments and errors as of `emit_checkpoint`."""
    emit_checkpoint(
        source_folder,
        checkpoint,
        target=MOE_TARGETS[routers.target],
        shape=shape,
        routers=lambda layer: routers.rows[layer],
        selection_bias=(lambda layer: routers.bias[layer]) if routers.biased else None,
        experts=experts,
        dtype=routers.dtype_asked,
        pad_to=routers.pad_to,
    )
