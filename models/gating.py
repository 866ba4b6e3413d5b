"""What a router's gate multiplies an expert by, relative to equal logits: 1 where all chosen experts weigh the same."""

from enum import StrEnum

from jaxtyping import Float, Int
from torch import Tensor


class GateKind(StrEnum):
    """How an architecture turns router logits into gates."""

    CONSTANT = "constant"  # whatever the logits: no architecture, an idealisation
    SOFTMAX_OF_CHOSEN = "softmax_of_chosen"  # over the K chosen, or over all and renormalised: the same
    SOFTMAX_OF_ALL = "softmax_of_all"  # over all E, not renormalised
    SIGMOID_OF_CHOSEN = "sigmoid_of_chosen"  # renormalised over the K chosen
    SIGMOID = "sigmoid"  # not renormalised


# Standard deviation of router logits that training and bf16 keep, and that costs next to nothing: at 1 a softmax weighs
# the experts of one token too differently, while its low precision is relative to the logits, that of a sigmoid to ½.
LOGIT_STD = {
    GateKind.CONSTANT: 1.0,
    GateKind.SOFTMAX_OF_CHOSEN: 0.3,
    GateKind.SOFTMAX_OF_ALL: 0.3,
    GateKind.SIGMOID_OF_CHOSEN: 1.0,
    GateKind.SIGMOID: 1.0,
}


def masked_gates(
    kind: GateKind, logits_TE: Float[Tensor, "T E"], mask_TE: Float[Tensor, "T E"]
) -> Float[Tensor, "T E"]:
    """Gates up to a factor, of all experts, for a choice that may be soft: 1 chosen, 0 not."""
    match kind:
        case GateKind.CONSTANT:
            return logits_TE.new_ones(logits_TE.shape)
        case GateKind.SOFTMAX_OF_ALL:
            return logits_TE.softmax(1)
        case GateKind.SIGMOID:
            return logits_TE.sigmoid()
        case GateKind.SOFTMAX_OF_CHOSEN:
            scores_TE = logits_TE.softmax(1)
        case GateKind.SIGMOID_OF_CHOSEN:
            scores_TE = logits_TE.sigmoid()
    return scores_TE / (scores_TE * mask_TE).sum(1, keepdim=True)


def relative_gates(
    kind: GateKind, logits_TE: Float[Tensor, "T E"], chosen_TK: Int[Tensor, "T K"]
) -> Float[Tensor, "T K"]:
    """Gates of the chosen experts times the scale that a checkpoint folds in: 1 each where logits are equal."""
    chosen_logits_TK = logits_TE.gather(1, chosen_TK)
    match kind:
        case GateKind.CONSTANT:
            gates_TK = chosen_logits_TK.new_ones(chosen_logits_TK.shape)
        case GateKind.SOFTMAX_OF_CHOSEN:
            gates_TK = chosen_logits_TK.softmax(1) * chosen_TK.shape[1]
        case GateKind.SOFTMAX_OF_ALL:
            gates_TK = logits_TE.softmax(1).gather(1, chosen_TK) * logits_TE.shape[1]
        case GateKind.SIGMOID_OF_CHOSEN:
            scores_TK = chosen_logits_TK.sigmoid()
            gates_TK = scores_TK / scores_TK.sum(1, keepdim=True) * chosen_TK.shape[1]
        case GateKind.SIGMOID:
            gates_TK = chosen_logits_TK.sigmoid() * 2
    return gates_TK
