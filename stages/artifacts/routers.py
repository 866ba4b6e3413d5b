"""assemble → project → evaluate: the routers of a carve."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from models.routing import LinearRouter, rounded
from stages.artifacts.tensor_file import load_contract, save_contract


@dataclass(frozen=True)
class Routers:
    """One linear router per layer: the K experts of highest x @ rowsᵀ + bias."""

    VERSION: ClassVar[int] = 2
    FILE: ClassVar[str] = "routers.safetensors"

    method: str
    target: str  # architecture of the checkpoint they were made for
    dtype_asked: str  # its number format: as asked for (source: every tensor keeps its own) ...
    dtype: str  # ... and that of its experts
    ridge_penalty: float  # it was fitted with, and ...
    balance: float  # ... what it paid for uneven load
    logit_std: float  # standard deviation of a token's logits over experts on the calibration text
    biased: bool  # the target chooses by a bias, too; where not, it is 0
    pad_to: int  # expert widths on disk are multiples of this
    rows: Tensor  # (L, E, D) float32, rounded to the checkpoint's number format
    bias: Tensor  # (L, E) float32

    def layer(self, index: int) -> LinearRouter:
        """The router of one layer."""
        return LinearRouter(self.rows[index], self.bias[index])

    def with_layers(self, layers: Sequence[LinearRouter]) -> "Routers":
        """The same with other routers, one per layer, rounded as the checkpoint rounds them."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        kept = [rounded(router.to("cpu"), dtype) for router in layers]
        rows_LED, bias_LE = (torch.stack(parts) for parts in zip(*((r.rows_ED, r.bias_E) for r in kept), strict=True))
        return replace(self, rows=rows_LED, bias=bias_LE)

    def save(self, folder: Path) -> None:
        """Write `folder/routers.safetensors`."""
        save_contract(self, folder / self.FILE, version=self.VERSION)

    @classmethod
    def load(cls, folder: Path) -> "Routers":
        """Read what `save` wrote. Raises ContractError."""
        return load_contract(cls, folder / cls.FILE, version=cls.VERSION)
