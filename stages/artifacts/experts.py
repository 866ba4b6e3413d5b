"""The experts of a carve on disk: as cut, one file per layer; and as a checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from models.card import render_card
from models.config import ModelConfig, MoEShape
from models.emit import checkpoint_dtype, emit_checkpoint
from models.experts import ExpertLoop, ExpertWeights
from models.finding import find_decoder
from models.routing import GateKind, LinearRouter
from models.targets.base import MoETarget, gate_kind, gate_scale_of
from models.targets.config import select_target
from models.targets.config_json import count_carved, count_dense
from stages.artifacts.carve import Partition, Routers
from stages.artifacts.rendering import in_millions
from stages.artifacts.tensor_file import layer_file, load_contract


@dataclass(frozen=True)
class ExtractedLayer:
    """The experts cut from one layer, and the numbers of their neurons in the dense FFN; one file."""

    VERSION: ClassVar[int] = 3

    experts: ExpertWeights
    neurons: Tensor  # (E, N) int32
    always_on: Tensor  # (S,) int32


def load_layer(folder: Path, layer: int) -> ExpertWeights:
    """All experts of one layer, bit for bit. Raises ContractError."""
    return load_contract(ExtractedLayer, layer_file(folder, layer)).experts


ROUTED = ("gate_END", "up_END", "down_EDN")


def load_pool(folder: Path, layers: int, device: torch.device) -> list[ExpertWeights]:
    """For every layer, all experts of the pool in fp32 and the layer's always-on neurons. Raises ContractError.

    Memory: the whole pool, twice while it is joined; the layers share it.
    """
    return join_pool([load_layer(folder, layer).to(device, torch.float32) for layer in range(layers)])


def join_pool(parts: Sequence[ExpertWeights]) -> list[ExpertWeights]:
    """Concatenate the layers' experts; all layers share the resulting tensors."""
    giving = [part for part in parts if len(part.gate_END)]  # empty stacks have no width to concatenate
    pool = {name: torch.cat([getattr(part, name) for part in giving]) for name in ROUTED}
    return [replace(part, **pool) for part in parts]


class FormatSettings(Protocol):
    """Settings of stage=assemble that later stages use."""

    target: str
    router: str
    ridge_penalty: float
    router_tokens: int
    pad_to: int | None
    dtype: str
    text_only: bool
    tied_embeddings: bool

    def balance_weight(self, *, pooled: bool) -> float:
        """Weight of uneven load in the router's objective."""


@dataclass(frozen=True)
class CheckpointFormat:
    """Architecture, number format and shape of the carved checkpoint."""

    model: ModelConfig  # the source
    source: Path  # its folder
    shape: MoEShape
    target: MoETarget
    dtype: torch.dtype  # of the experts
    settings: FormatSettings

    @classmethod
    def of(cls, model: ModelConfig, source: Path, settings: FormatSettings, shape: MoEShape) -> "CheckpointFormat":
        """The format that the settings of stage=assemble select."""
        target = select_target(find_decoder(source, text_only=settings.text_only), settings.target, shape)
        return cls(model, source, shape, target, checkpoint_dtype(source, settings.dtype), settings)

    @property
    def gate(self) -> GateKind:
        """The architecture's function from logits to gates."""
        return GateKind(gate_kind(self.target, self.shape))

    @property
    def down_scale(self) -> float:
        """Factor on the experts' down projections in the checkpoint."""
        return gate_scale_of(self.target, self.shape).down_scale

    @property
    def balance_weight(self) -> float:
        """Weight of uneven load in the routers' objective."""
        return self.settings.balance_weight(pooled=self.shape.pooled)

    def loop(
        self,
        partition: Partition,
        layer: int,
        experts: ExpertWeights,
        router: LinearRouter,
        act: Callable[[Tensor], Tensor],
        device: torch.device,
    ) -> ExpertLoop:
        """The MoE of one layer in fp32, as the checkpoint computes it; with a pool it routes over all experts."""
        neurons_EN, always_S = partition.routed(layer), partition.always_on[layer]
        return ExpertLoop(
            experts.to(device, torch.float32), neurons_EN.to(device), always_S.to(device),
            router.to(device), self.shape.top_k, partition.width, act, self.gate,
        )  # fmt: skip

    def write(
        self,
        out: Path,
        fitted: Mapping[int, LinearRouter],
        logit_std: float,
        experts: Callable[[int], ExpertWeights],
        partition: Partition,
        projection: str,
    ) -> None:
        """Write the routers, and `checkpoint/` with its model card.

        `experts` and errors are those of `emit_checkpoint`; `projection` is a sentence for the card.
        """
        routers = Routers.of(fitted, partition.layers, self.dtype, logit_std)
        routers.save(out)
        emit_checkpoint(
            self.source,
            out / "checkpoint",
            target=self.target,
            shape=self.shape,
            routers=lambda layer: routers.rows[layer],
            experts=experts,
            dtype=self.settings.dtype,
            pad_to=self.settings.pad_to,
            text_only=self.settings.text_only,
            tied_embeddings=self.settings.tied_embeddings,
        )
        dense, pad_to = find_decoder(self.source, text_only=self.settings.text_only), self.settings.pad_to
        tied = dense.tied and self.settings.tied_embeddings
        active = count_carved(dense, self.target, self.shape, pad_to, tied=tied).active
        rows = {
            "active parameters": f"{in_millions(active)} of the dense model's {in_millions(count_dense(dense).active)}",
            "neurons left out": f"{partition.dropped} in all layers together",
            "most copies of one neuron": int(partition.multiplicity.max()),
            "partition": partition.description,
            "router": self.settings.router,
            "projection": projection,
        }
        card = render_card(self.model.source_name, self.target, self.shape, rows, dense, pad_to, tied=tied)
        (out / "checkpoint/README.md").write_text(card, encoding="utf-8")
