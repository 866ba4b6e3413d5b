"""The model card of a carve, from the contracts of its stages."""

from pathlib import Path

from models.config import ModelConfig
from models.families.card import CarveFacts, write_card
from models.families.moe import MOE_TARGETS
from models.shape import Shape
from stages.contracts.partition import Partition
from stages.contracts.pool_partition import PoolPartition
from stages.contracts.routers import Routers


def write_carve_card(
    checkpoint: Path,
    model: ModelConfig,
    shape: Shape,
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
            source=model.name or model.path or model.label,
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
