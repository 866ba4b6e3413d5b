"""What the parameter-level scanner hands over: norms by sample, parameter and block."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from torch import Tensor


@dataclass(frozen=True)
class WatchedParameter:
    """One watched weight, (out_features, in_features), and how its blocks are cut.

    Input block i holds columns i·width to (i+1)·width of the weight, output block o those rows; the last may be
    narrower. An embedding (V, D) looks rows up: its inputs are not cut, its output blocks are blocks of D.
    """

    name: str  # of the weight: model.layers.0.self_attn.q_proj.weight
    kind: str  # linear or embedding
    in_features: int
    out_features: int
    block_width: int

    @property
    def in_blocks(self) -> int:
        """Number of input blocks."""
        return 0 if self.kind == "embedding" else ceil(self.in_features / self.block_width)

    @property
    def out_blocks(self) -> int:
        """Number of output blocks."""
        return ceil(self.out_features / self.block_width)


@dataclass(frozen=True)
class ScannedSequence:
    """One sample."""

    name: str
    tokens: int
    source: str = ""


@dataclass(frozen=True)
class ScanRecord:
    """L2 norms of B samples for P parameters, float32 on the CPU.

    Columns of (B, P) follow the parameter table; (B, I) and (B, O) hold the input and output blocks of all parameters
    one after the other. NaN where nothing was measured (a forward-only pass has no gradient).
    """

    sequences: Sequence[ScannedSequence]
    activation_BP: Tensor  # ‖X‖ of the direct input over the sample's tokens; embedding: of the rows looked up
    gradient_BP: Tensor  # ‖∂loss/∂W‖
    in_activation_BI: Tensor  # ‖X[:, block]‖
    in_gradient_BI: Tensor  # ‖∂loss/∂W[:, block]‖
    out_gradient_BO: Tensor  # ‖∂loss/∂W[block, :]‖
    # Where asked for, one (T, P) tensor per sample, T its tokens: ‖x_t‖, and ‖x_t‖·‖δ_t‖, the norm of what position t
    # contributes to the weight's gradient. That is not the gradient of token t's own loss.
    token_activation: Sequence[Tensor] | None = None
    token_gradient: Sequence[Tensor] | None = None
