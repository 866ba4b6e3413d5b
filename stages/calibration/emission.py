"""The checkpoint of a carve and its model card, from the artifacts of its stages."""

from collections.abc import Callable
from pathlib import Path

from models.card import CarveFacts, write_card
from models.config import ModelConfig
from models.emit import emit_checkpoint
from models.experts import LayerExperts
from models.shape import MoEShape
from models.targets.base import MOE_TARGETS
from stages.artifacts.partition import Partition, PoolPartition
from stages.artifacts.routers import Routers


def emit_carve(
    source_folder: Path, checkpoint: Path, shape: MoEShape, routers: Routers, experts: Callable[[int], LayerExperts]
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


def write_carve_card(
    checkpoint: Path,
    model: ModelConfig,
    shape: MoEShape,
    partition: Partition | PoolPartition,
    routers: Routers,
    projection: str,
) -> None:
    """Write the card into the checkpoint's folder."""
    layers = partition.layers
    multiplicity_LF = partition.multiplicity
    write_card(
        checkpoint,
        CarveFacts(
            source=model.name or Path(model.path or model.label).resolve().name,
            target=MOE_TARGETS[routers.target],
            shape=shape,
            width=partition.width,
            layers=layers,
            dropped=int((multiplicity_LF == 0).sum()) - layers * shape.always_on,
            most_copies=int(multiplicity_LF.max()),
            partition=partition.description,
            router=routers.method,
            projection=projection,
            pad_to=routers.pad_to,
        ),
    )
