"""How a router spreads tokens, and how far it chooses what is best."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from models.expert_loop import ExpertLoop
from models.routing import LinearRouter, chosen_mask
from stages.calibration.alignment import relative_error
from stages.calibration.spread import pick_tokens, take_tokens
from stages.routing.task import RouterTask

MEASURED = 4096  # tokens, spread over the text: a figure for the report, at the price of the whole layer on each


def set_spread(router: LinearRouter, inputs: Sequence[Tensor], spread: float) -> LinearRouter:
    """Scale the router so that a token's logits have the standard deviation `spread` over experts, on average.

    Rows and bias are centred first: a shift common to all experts changes neither softmax nor choice.
    """
    centred_ED = router.rows_ED - router.rows_ED.mean(0)
    squares = sum(float((x_TD @ centred_ED.T).double().square().mean(1).sum()) for x_TD in inputs)
    deviation = (squares / sum(len(x_TD) for x_TD in inputs)) ** 0.5
    scale = spread / deviation if deviation > 0 else 1.0
    return LinearRouter(centred_ED * scale, (router.bias_E - router.bias_E.mean()) * scale)


def load_balance(router: LinearRouter, inputs: Sequence[Tensor], top_k: int) -> Float[Tensor, "E"]:
    """Each expert's share of the routed tokens, relative to an even share (1 = even)."""
    counts_E = torch.zeros(router.experts, device=router.rows_ED.device)
    for x_TD in inputs:
        counts_E += torch.bincount(router.choose(x_TD, top_k).flatten(), minlength=router.experts)
    return counts_E / counts_E.mean()


def oracle_agreement(router: LinearRouter, task: RouterTask) -> float:
    """Agreement with the contribution oracle: mean share of its K experts that the router also chooses.

    In a pool, contribution is what an expert takes off the error: the error oracle.
    """
    agreed, total = 0, 0
    for index, x_TD in enumerate(task.inputs):
        chosen_TE = chosen_mask(router.choose(x_TD, task.top_k), router.experts)
        best_TK = task.best_experts(index)
        agreed += int(chosen_TE.gather(1, best_TK).sum())
        total += best_TK.numel()
    return agreed / total


def relative_output_error(loop: ExpertLoop, task: RouterTask, tokens: int = MEASURED) -> float:
    """Σ‖target − output‖² / Σ‖target‖² of the layer, on `tokens` of the task's at most."""
    picks = pick_tokens([len(x_TD) for x_TD in task.inputs], tokens)
    seen = take_tokens(task.inputs, picks)
    wanted = [
        task.target(index, x_TD)[pick_t] for index, (x_TD, pick_t) in enumerate(zip(task.inputs, picks, strict=True))
    ]
    return relative_error(loop, seen, lambda index, _: wanted[index], range(len(seen)))
