"""What the carve is compared with, each as active copies of units: masks, routers, oracles."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from models.expert_loop import ExpertLoop
from models.ffn import DenseFFN
from models.routing import LinearRouter, has_copies
from models.shape import Shape
from stages.calibration.carved_ffn import CarvedFFN, Copies, oracle_copies, replica_scale, routed_copies
from stages.calibration.elimination import rank_by_alignment


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
    pool: ExpertLoop | None = (
        None  # of a global pool: the layer as its checkpoint holds it; `units_EN` are of all layers
    )


def copies_of(method: str, facts: LayerFacts) -> Copies:
    """Active copies of the baseline `method`, without its `_aligned`.

    unaligned: the carve's own router on plain slices. random_router: seeded normal rows. oracle: the output oracle,
    which chooses the experts of largest output norm.
    """
    width, top_k = facts.ffn.width, facts.shape.top_k
    match method:
        case "unaligned":
            return routed_copies(facts.units_EN, facts.always_S, width, top_k, facts.router)
        case "random_router":
            generator = torch.Generator().manual_seed(facts.seed)
            rows_ED = torch.randn(facts.router.rows_ED.shape, generator=generator).to(facts.router.rows_ED)
            return routed_copies(facts.units_EN, facts.always_S, width, top_k, LinearRouter.without_bias(rows_ED))
        case "oracle":
            return oracle_copies(facts.ffn, facts.units_EN, facts.always_S, top_k)
    raise AssertionError(f"no baseline {method}")


def start_baseline(method: str, facts: LayerFacts, inputs: list[Tensor]) -> CarvedFFN:
    """The baseline before alignment; copies of a unit share its weight as in the carve."""
    if method in MASKS:
        return mask_units(facts, MASKS[method](facts, inputs))
    copies = copies_of(method, facts)
    down_DF = facts.ffn.down_DF
    if has_copies(facts.units_EN):
        down_DF = down_DF * replica_scale(copies, facts.ffn, inputs)
    return CarvedFFN(facts.ffn, copies, down_DF)


# What the units of a static mask are the highest of. best_mask: of what alignment cannot make up for, see
# `rank_by_alignment`; the strongest mask there is here.
MASKS: dict[str, Callable[[LayerFacts, list[Tensor]], Tensor]] = {
    "static_mask": lambda facts, _: facts.contribution_F,
    "best_mask": lambda facts, inputs: rank_by_alignment(facts.ffn, inputs, facts.shape.active_width),
}


def mask_units(facts: LayerFacts, measure_F: Float[Tensor, "F"]) -> CarvedFFN:
    """The S + K·N units of highest measure for every token, as a narrower FFN: no routing, no other unit's cost."""
    ffn = facts.ffn
    kept = measure_F.topk(min(ffn.width, facts.shape.active_width)).indices.sort().values.to(ffn.down_DF.device)
    narrow = DenseFFN(ffn.gate_FD[kept], ffn.up_FD[kept], ffn.down_DF[:, kept], ffn.act)
    return CarvedFFN(narrow, lambda _x_TD, h_TF: torch.ones_like(h_TF), narrow.down_DF)
