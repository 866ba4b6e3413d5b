"""What the carve is compared with, each as active copies of neurons: masks, routers, oracles."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from models.config import MoEShape
from models.experts import ExpertLoop
from models.ffn import DenseFFN
from models.routing import LinearRouter, active_copies, choose_experts, chosen_mask, has_copies, membership
from stages.calibration.elimination import rank_by_alignment
from stages.evaluate.carved_ffn import CarvedFFN, expert_grams, output_norms


@dataclass(frozen=True)
class LayerFacts:
    """One layer of the carve, and what the scan found of its neurons."""

    ffn: DenseFFN
    neurons_EN: Int[Tensor, "E N"]
    always_S: Int[Tensor, "S"]
    router: LinearRouter
    contribution_F: Float[Tensor, "F"]
    shape: MoEShape
    seed: int
    pool: ExpertLoop | None = (
        None  # of a global pool: the layer as its checkpoint holds it; `neurons_EN` are of all layers
    )


# (inputs, activations of all neurons) → the K experts of every token.
Choice = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Baseline:
    """A baseline before alignment, and how its features follow from the activations of all neurons."""

    carved: CarvedFFN
    features: Callable[[Tensor, Tensor], Tensor]  # (T, D) inputs, (T, F) activations → what its columns multiply


def choice_of(method: str, facts: LayerFacts) -> Choice:
    """The experts that the baseline `method` sends a token to, without its `_aligned`.

    unaligned: the carve's own router on plain slices. random_router: seeded normal rows. oracle: the output oracle,
    which chooses the experts of largest output norm, seen before choosing: no router can know this.
    """
    top_k = facts.shape.top_k
    match method:
        case "unaligned":
            return lambda x_TD, _h: facts.router.choose(x_TD, top_k)
        case "random_router":
            generator = torch.Generator().manual_seed(facts.seed)
            rows_ED = torch.randn(facts.router.rows_ED.shape, generator=generator).to(facts.router.rows_ED)
            drawn = LinearRouter.without_bias(rows_ED)
            return lambda x_TD, _h: drawn.choose(x_TD, top_k)
        case "oracle":
            grams_ENN = expert_grams(facts.ffn, facts.neurons_EN)
            return lambda _x, h_TF: choose_experts(output_norms(grams_ENN, h_TF, facts.neurons_EN), top_k)
    raise AssertionError(f"no baseline {method}")


def start_baseline(
    method: str, facts: LayerFacts, inputs: Sequence[Tensor], hidden: Callable[[Tensor], Tensor] | None = None
) -> Baseline:
    """The baseline before alignment; copies of a neuron share its weight as in the carve.

    Args:
        method: name without `_aligned`.
        facts: of the layer.
        inputs: calibration inputs, for a mask that is chosen by them and for neurons that have copies.
        hidden: inputs → activations of all neurons; None computes them.
    """
    if method in MASKS:
        return mask_neurons(facts, MASKS[method](facts, inputs))
    choose = choice_of(method, facts)
    member_EF = membership(facts.neurons_EN, facts.ffn.width)
    down_DF = facts.ffn.down_DF
    if has_copies(facts.neurons_EN):
        # A router does not look at the activations.
        looked_at = (hidden or facts.ffn.hidden) if method == "oracle" else (lambda x_TD: x_TD)
        chosen = (choose(x_TD, looked_at(x_TD)) for x_TD in inputs)
        down_DF = down_DF * copies_scale(chosen, member_EF, facts.always_S)

    def features(x_TD: Tensor, h_TF: Tensor) -> Tensor:
        return h_TF * active_copies(choose(x_TD, h_TF), member_EF, facts.always_S)

    return Baseline(CarvedFFN(lambda x_TD: features(x_TD, facts.ffn.hidden(x_TD)), down_DF), features)


def copies_scale(
    chosen: Iterable[Int[Tensor, "T K"]], member_EF: Float[Tensor, "E F"], always_S: Int[Tensor, "S"]
) -> Float[Tensor, "F"]:
    """Σ_t c_j / Σ_t c_j², the least-squares constant for a neuron that may be active more than once.

    It follows from how often two experts are chosen together: with m_ej = 1 where expert e holds neuron j,
    c_j = Σ_e chosen_e·m_ej, so that E × E counts replace T × F copies.
    """
    experts = len(member_EF)
    together_EE = torch.zeros(experts, experts, dtype=torch.float64, device=member_EF.device)
    for chosen_TK in chosen:
        mask_TE = chosen_mask(chosen_TK, experts)
        together_EE += (mask_TE.T @ mask_TE).double()  # whole numbers below 2^24: exact
    held_EF = member_EF.double()
    first_F = together_EE.diagonal() @ held_EF
    second_F = ((together_EE @ held_EF) * held_EF).sum(0)
    scale_F = torch.where(second_F > 0, first_F / second_F.clamp_min(1), 1.0)
    scale_F[always_S.long()] = 1.0
    return scale_F.float()


# What the neurons of a static mask are the highest of. best_mask: of what alignment cannot make up for, see
# `rank_by_alignment`; the strongest mask there is here.
MASKS: dict[str, Callable[[LayerFacts, Sequence[Tensor]], Tensor]] = {
    "static_mask": lambda facts, _: facts.contribution_F,
    "best_mask": lambda facts, inputs: rank_by_alignment(facts.ffn, inputs, facts.shape.active_width),
}


def mask_neurons(facts: LayerFacts, measure_F: Float[Tensor, "F"]) -> Baseline:
    """The S + K·N neurons of highest measure for every token, as a narrower FFN: no routing, no other neuron's cost."""
    ffn = facts.ffn
    kept = measure_F.topk(min(ffn.width, facts.shape.active_width)).indices.sort().values.to(ffn.down_DF.device)
    narrow = DenseFFN(ffn.gate_FD[kept], ffn.up_FD[kept], ffn.down_DF[:, kept], ffn.act)
    return Baseline(CarvedFFN(narrow.hidden, narrow.down_DF), lambda _x, h_TF: h_TF.index_select(1, kept))
