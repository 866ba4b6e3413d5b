"""One layer on its way through the projection."""

from dataclasses import dataclass

from torch import Tensor

from models.expert_loop import ExpertLoop
from models.ffn import DenseFFN
from models.gating import GateKind
from models.routing import LinearRouter
from models.shape import Shape
from stages.routing.fit import RouterSettings


@dataclass(frozen=True)
class LayerCarve:
    """What the earlier stages decided for one layer."""

    ffn: DenseFFN
    units_EN: Tensor
    always_S: Tensor
    router: LinearRouter
    shape: Shape
    refit: RouterSettings
    spread: float  # of the router's logits on the text
    biased: bool  # the router may have a bias
    gate: GateKind = GateKind.CONSTANT
    text: int | None = None  # batches of text, the first of the inputs; None: all


@dataclass(frozen=True)
class Guarded:
    """The layer after a step, and its error on the guard tokens."""

    loop: ExpertLoop
    error: float
