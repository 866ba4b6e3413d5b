"""Baselines: dense FFNs with some neurons active per token, chosen by a mask, a router, an oracle or CMoE.

y(x) = Σ_j c_j(x)·h_j(x)·w_j, where c_j is the number of active copies of neuron j. Copies share a down column, so every
partition, replicated or not, is one F × D matrix and costs one dense FFN.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from models.config import MoEShape
from models.experts import Block
from models.ffn import DenseFFN
from models.routing import LinearRouter, active_copies, choose_experts, chosen_mask, has_copies, membership
from stages.calibration.alignment import least_squares, neuron_moments
from stages.calibration.balanced import assign_balanced
from stages.calibration.share import Share

# Seeds of random routers start here: with those of stage=assemble, its random router would be drawn again.
FIRST_SEED = 5_000


@dataclass(frozen=True)
class CarvedFFN:
    """`features(x_TD)` returns c_j(x)·h_j(x) of all neurons, (T, F); `down_DF` holds their columns."""

    features: Callable[[Tensor], Tensor]
    down_DF: Tensor

    @property
    def width(self) -> int:
        """F."""
        return self.down_DF.shape[1]

    def run(self, x_TD: Float[Tensor, "T D"]) -> tuple[list[Block], Float[Tensor, "T D"]]:
        """The features of all neurons, and the output."""
        features_TF = self.features(x_TD)
        everyone, neurons_F = (torch.arange(count, device=x_TD.device) for count in features_TF.shape)
        return [Block(everyone, neurons_F, features_TF)], features_TF @ self.down_DF.T

    def __call__(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """The output."""
        return self.features(x_TD) @ self.down_DF.T

    def with_change(self, change_DF: Float[Tensor, "D F"]) -> "CarvedFFN":
        """The same features with `change_DF` added to the down columns."""
        return replace(self, down_DF=self.down_DF + change_DF)


def expert_grams(ffn: DenseFFN, neurons_EN: Int[Tensor, "E N"]) -> Float[Tensor, "E N N"]:
    """Gram matrix d_i·d_j of every expert's down columns, in fp32: squares leave float16's range."""
    columns_END = ffn.down_DF.T[neurons_EN.long()].float()
    return columns_END @ columns_END.mT


def output_norms(
    grams_ENN: Float[Tensor, "E N N"], h_TF: Float[Tensor, "T F"], neurons_EN: Int[Tensor, "E N"]
) -> Float[Tensor, "T E"]:
    """‖Σ_{i∈e} h_i·d_i‖ of every expert, computed as sqrt(h_eᵀ·Gram_e·h_e) with N columns instead of D."""
    h_TF = h_TF.float()
    norms_TE = h_TF.new_empty(len(h_TF), len(neurons_EN))
    for expert, (gram_NN, neurons_N) in enumerate(zip(grams_ENN, neurons_EN.long(), strict=True)):
        h_TN = h_TF.index_select(1, neurons_N)
        norms_TE[:, expert] = torch.linalg.vecdot(h_TN @ gram_NN, h_TN)
    return norms_TE.clamp_min_(0).sqrt_()


@dataclass(frozen=True)
class LayerFacts:
    """One layer of the carve, and the contribution of its neurons in the scan."""

    ffn: DenseFFN
    neurons_EN: Int[Tensor, "E N"]
    always_S: Int[Tensor, "S"]
    router: LinearRouter
    contribution_F: Float[Tensor, "F"]
    shape: MoEShape
    seed: int
    stays_dense: bool = False  # the carve and every baseline keep the layer's FFN


FactsOf = Callable[[int, DenseFFN], LayerFacts]
# (inputs, function to their activations of all neurons) → the K experts of every token
Choice = Callable[[Tensor, Callable[[], Tensor]], Tensor]


def choice_of(method: str, facts: LayerFacts) -> Choice:
    """How the baseline `method`, named without `_aligned`, chooses experts.

    unaligned: by the carve's router. random_router: by seeded normal rows. oracle: the experts of largest output norm,
    which a router cannot know.
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
            return lambda _x, hidden: choose_experts(output_norms(grams_ENN, hidden(), facts.neurons_EN), top_k)
    raise AssertionError(f"no baseline {method}")


def start_baseline(method: str, facts: LayerFacts, inputs: Sequence[Tensor]) -> CarvedFFN:
    """The baseline `method` (without `_aligned`) before alignment.

    A neuron with copies is scaled by Σ_t c_j / Σ_t c_j², its least-squares scale on calibration `inputs`, which are
    read only for this.
    """
    if method == "static_mask":
        return mask_neurons(facts)
    ffn, choose = facts.ffn, choice_of(method, facts)
    if not has_copies(facts.neurons_EN):
        return route(facts, choose)
    experts, member_EF = len(facts.neurons_EN), membership(facts.neurons_EN, ffn.width)
    copies_2F = neuron_moments(
        inputs, lambda x_TD: chosen_mask(choose(x_TD, partial(ffn.hidden, x_TD)), experts), member_EF
    )
    return route(facts, choose, least_squares(copies_2F))


def route(facts: LayerFacts, choose: Choice, scale_F: Float[Tensor, "F"] | float = 1.0) -> CarvedFFN:
    """The layer's experts, chosen by `choose`, and its always-on neurons, with scaled down columns."""
    ffn, member_EF = facts.ffn, membership(facts.neurons_EN, facts.ffn.width)

    def features(x_TD: Tensor) -> Tensor:
        h_TF = ffn.hidden(x_TD)
        return h_TF * active_copies(choose(x_TD, lambda: h_TF), member_EF, facts.always_S)

    return CarvedFFN(features, ffn.down_DF * scale_F)


def mask_neurons(facts: LayerFacts) -> CarvedFFN:
    """A narrower FFN without routing: the S + K·N neurons of highest contribution, the same for every token."""
    ffn, width = facts.ffn, min(facts.ffn.width, facts.shape.active_width)
    kept = facts.contribution_F.topk(width).indices.sort().values.to(ffn.down_DF.device)
    narrow = DenseFFN(ffn.gate_FD[kept], ffn.up_FD[kept], ffn.down_DF[:, kept], ffn.act)
    return CarvedFFN(narrow.hidden, narrow.down_DF)


CMOE_ACTIVE = 10  # K_a: neurons that count as active for a token
CMOE_TOKENS = 16_384  # calibration tokens that its code reads


def carve_cmoe(facts: LayerFacts, inputs: Sequence[Tensor]) -> tuple[LayerFacts, Choice]:
    """CMoE: tokens go to the experts whose typical neurons, as `select_cmoe` finds them, are most active."""
    carved, typical = select_cmoe(facts, inputs)
    top_k = min(facts.shape.top_k, len(carved.neurons_EN))
    return carved, lambda x_TD, _h: choose_experts(typical.hidden(x_TD).abs(), top_k)


def select_cmoe(facts: LayerFacts, inputs: Sequence[Tensor]) -> tuple[LayerFacts, DenseFFN]:
    """CMoE: shared neurons and experts by coactivation, routers from each expert's most typical neuron.

    The S neurons that are most often active are shared. The next ones seed the experts; the others join them in one
    balanced assignment by the tokens on which they are active. Neurons that fill no expert, those least often active,
    are dropped. Returns the layer, and the typical neuron of each expert, the one closest to its mean, as its router.

    Source: arXiv:2502.04416, sections 3.1 and 3.2, as in its published code; differs: neither gate scales nor load
    balancing, which start at zero and are trained.
    """
    shape, gate_FD, up_FD = facts.shape, facts.ffn.gate_FD, facts.ffn.up_FD
    ffn = replace(facts.ffn, gate_FD=normalize(gate_FD, dim=1), up_FD=normalize(up_FD, dim=1))
    together_FF = count_coactive(ffn, inputs, min(CMOE_ACTIVE, facts.ffn.width)).cpu()
    order_F = together_FF.diagonal().argsort(descending=True, stable=True)
    always_S, others_U = order_F[: shape.always_on], order_F[shape.always_on :]
    size = min(shape.n, len(others_U))
    experts = len(others_U) // size
    others_U = others_U[: experts * size]
    together_UU = together_FF[others_U][:, others_U]
    active_U = together_UU.diagonal()
    # The L1 distance of two neurons' 0/1 rows over all tokens.
    distance_UE = active_U[:, None] + active_U[:experts] - 2 * together_UU[:, :experts]
    labels_U = assign_balanced(-distance_UE.float(), torch.full((experts,), size))
    neurons_EN = others_U[labels_U.argsort(stable=True)].view(experts, size)
    to_mean_EN = torch.stack(
        [
            together_FF.diagonal()[neurons_N] - 2 * together_FF[neurons_N][:, neurons_N].double().mean(1)
            for neurons_N in neurons_EN
        ]
    )
    typical_E = neurons_EN.gather(1, to_mean_EN.argmin(1, keepdim=True))[:, 0].to(ffn.gate_FD.device)
    typical = DenseFFN(ffn.gate_FD[typical_E], ffn.up_FD[typical_E], ffn.down_DF[:, typical_E], ffn.act)
    device = facts.ffn.gate_FD.device
    return replace(facts, neurons_EN=neurons_EN.to(device), always_S=always_S.to(device)), typical


def count_coactive(ffn: DenseFFN, inputs: Sequence[Tensor], active: int) -> Int[Tensor, "F F"]:
    """On how many tokens of text both neurons are among the `active` largest |h|, for inputs of length 1; int32."""
    width = len(ffn.gate_FD)
    together_P = torch.zeros(width * width, dtype=torch.int32, device=ffn.gate_FD.device)
    text = Share.of(inputs).only_text()
    for x_TD in text:
        top_TA = ffn.hidden(normalize(x_TD, dim=1)).abs().topk(active, dim=1).indices
        pairs_TAA = top_TA[:, :, None] * width + top_TA[:, None]
        together_P.index_add_(0, pairs_TAA.flatten(), together_P.new_ones(pairs_TAA.numel()))
    text.workers.sum_(together_P)
    return together_P.view(width, width)
