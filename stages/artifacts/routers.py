"""assemble → project → evaluate, train: the routers of a carve."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from models.routing import LinearRouter, rounded
from stages.artifacts.tensor_file import TensorFile


@dataclass(frozen=True)
class Routers(TensorFile):
    """One linear router per layer: the K experts of highest x @ rowsᵀ + bias."""

    VERSION: ClassVar[int] = 3
    FILE: ClassVar[str] = "routers.safetensors"

    rows: Tensor  # (L, E, D) float32, rounded to the checkpoint's number format
    bias: Tensor  # (L, E) float32; 0 where the target has none
    logit_std: float  # standard deviation of a token's logits over experts on the calibration text

    @classmethod
    def of(cls, layers: Sequence[LinearRouter], dtype: torch.dtype, logit_std: float) -> "Routers":
        """One router per layer, rounded as a checkpoint of that number format rounds them."""
        kept = [rounded(router.to("cpu"), dtype) for router in layers]
        rows_LED, bias_LE = (torch.stack(parts) for parts in zip(*((r.rows_ED, r.bias_E) for r in kept), strict=True))
        return cls(rows_LED, bias_LE, logit_std)

    def layer(self, index: int) -> LinearRouter:
        """The router of one layer."""
        return LinearRouter(self.rows[index], self.bias[index])
