"""What the carve is compared with, each as active copies of units: masks, routers, oracles."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from models.ffn import DenseFFN
from models.routing import LinearRouter, has_copies
from models.shape import Shape
from stages.calibration.carved_ffn import CarvedFFN, Copies, oracle_copies, replica_scale, routed_copies, static_copies


@dataclass(frozen=True)
class LayerFacts:
    """One layer of the carve, and what the scan found of its units."""

    ffn: DenseFFN
    units_EN: Int[Tensor, "E N"]
    always_S: Int[Tensor, "S"]
    router: LinearRouter
    contribution_F: Float[Tensor, "F"]
    shape: Shape
    seed: int


def copies_of(method: str, facts: LayerFacts) -> Copies:
    """Active copies of the baseline `method`, without its `_aligned`.

    unaligned: the carve's own router on plain slices. static_mask: the S + K·N units of highest mean contribution, for
    every token. random_router: seeded normal rows. oracle: the experts of largest output norm.
    """
    width, top_k = facts.ffn.width, facts.shape.top_k
    match method:
        case "unaligned":
            return routed_copies(facts.units_EN, facts.always_S, width, top_k, facts.router)
        case "static_mask":
            kept = facts.contribution_F.topk(min(width, facts.shape.active_width)).indices
            return static_copies(kept, width)
        case "random_router":
            generator = torch.Generator().manual_seed(facts.seed)
            rows_ED = torch.randn(facts.router.rows_ED.shape, generator=generator).to(facts.router.rows_ED)
            return routed_copies(facts.units_EN, facts.always_S, width, top_k, LinearRouter.without_bias(rows_ED))
        case "oracle":
            return oracle_copies(facts.ffn, facts.units_EN, facts.always_S, top_k)
    raise AssertionError(f"no baseline {method}")


def start_baseline(method: str, facts: LayerFacts, inputs: list[Tensor]) -> CarvedFFN:
    """The baseline before alignment; copies of a unit share its weight as in the carve."""
    copies = copies_of(method, facts)
    down_DF = facts.ffn.down_DF
    if method != "static_mask" and has_copies(facts.units_EN):
        down_DF = down_DF * replica_scale(copies, facts.ffn, inputs)
    return CarvedFFN(facts.ffn, copies, down_DF)
