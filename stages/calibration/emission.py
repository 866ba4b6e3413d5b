"""Which checkpoint a carve becomes; and its writing, with the model card, from the artifacts of the stages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from models.card import CarveFacts, write_card
from models.config import ModelConfig, MoEShape
from models.emit import checkpoint_dtype, emit_checkpoint
from models.experts import ExpertWeights
from models.routing import GateKind
from models.targets.base import MoETarget, gate_kind, gate_scale_of
from models.targets.choose import select_target
from stages.artifacts.carve import Partition, PoolPartition, Routers


class FormatSettings(Protocol):
    """Settings of stage=assemble that every later stage goes by."""

    target: str
    router: str
    ridge_penalty: float
    mode: str
    pad_to: int
    dtype: str

    def load_price(self, *, pooled: bool) -> float:
        """What a router pays for uneven load."""


@dataclass(frozen=True)
class CheckpointFormat:
    """Architecture, number format and shape of the checkpoint that a carve becomes."""

    source: Path  # folder of the dense checkpoint
    shape: MoEShape
    target: MoETarget
    dtype: torch.dtype  # of the experts
    settings: FormatSettings

    @classmethod
    def of(
        cls, source: Path, config: Mapping[str, Any], settings: FormatSettings, shape: MoEShape
    ) -> "CheckpointFormat":
        """What the settings of stage=assemble ask for; `config` is the source's config.json."""
        target = select_target(config["model_type"], settings.target, shape.always_on, pooled=shape.pooled)
        return cls(source, shape, target, checkpoint_dtype(source, settings.dtype), settings)

    @property
    def gate(self) -> GateKind:
        """How the architecture turns logits into gates."""
        return GateKind(gate_kind(self.target, self.shape))

    @property
    def down_scale(self) -> float:
        """What the experts' down projections are multiplied by when they are written."""
        return gate_scale_of(self.target, self.shape).down_scale

    @property
    def biased(self) -> bool:
        """Whether routers choose by a bias, too; it is written for small logits alone."""
        return self.target.selection_bias is not None and self.settings.mode == "parity"

    @property
    def load_price(self) -> float:
        """What routers pay for uneven load."""
        return self.settings.load_price(pooled=self.shape.pooled)

    def write(self, folder: Path, routers: Routers, experts: Callable[[int], ExpertWeights]) -> None:
        """Write the checkpoint; `experts` and errors as of `emit_checkpoint`."""
        emit_checkpoint(
            self.source,
            folder,
            target=self.target,
            shape=self.shape,
            routers=lambda layer: routers.rows[layer],
            selection_bias=(lambda layer: routers.bias[layer]) if self.biased else None,
            experts=experts,
            dtype=self.settings.dtype,
            pad_to=self.settings.pad_to,
        )

    def write_card(
        self, folder: Path, model: ModelConfig, partition: Partition | PoolPartition, projection: str
    ) -> None:
        """Write the model card into the checkpoint's folder; `projection` says in a sentence what was done."""
        multiplicity_LF = partition.multiplicity
        write_card(
            folder,
            CarveFacts(
                source=model.name or Path(model.path or model.label).resolve().name,
                target=self.target,
                shape=self.shape,
                width=partition.width,
                layers=partition.layers,
                dropped=int((multiplicity_LF == 0).sum()) - partition.layers * self.shape.always_on,
                most_copies=int(multiplicity_LF.max()),
                partition=partition.description,
                router=self.settings.router,
                projection=projection,
                pad_to=self.settings.pad_to,
            ),
        )
