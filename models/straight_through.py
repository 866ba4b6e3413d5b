"""Compute all experts in training, so that a router also learns about experts it did not choose."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from instruments.errors import ConfigError
from models.training import router_names, selection_bias, without_adapters

IMPLEMENTATION = "straight_through"  # as `from_pretrained` takes it for experts_implementation
TEMPERATURE = 0.5  # of the soft choice, relative to the standard deviation of a token's scores


def soft_choice(scores_TE: Float[Tensor, "T E"], chosen_TK: Int[Tensor, "T K"]) -> Float[Tensor, "T E"]:
    """Sigmoid of each score's distance from the border between the chosen experts and the others.

    The border is half-way between the lowest chosen score and the highest other one. Border and width have no gradient.
    If all experts are chosen or all scores are equal, there is no border, and the gradient is 0.
    """
    chosen_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, chosen_TK, True)
    with torch.no_grad():
        lowest_T1 = scores_TE.masked_fill(~chosen_TE, torch.inf).amin(1, keepdim=True)
        highest_T1 = scores_TE.masked_fill(chosen_TE, -torch.inf).amax(1, keepdim=True)
        spread_T1 = scores_TE.std(1, keepdim=True, correction=min(1, scores_TE.shape[1] - 1))
        divided_T1 = highest_T1.isfinite() & (spread_T1 > 0)
        border_T1 = torch.where(divided_T1, (lowest_T1 + highest_T1) / 2, 0)
        width_T1 = torch.where(divided_T1, TEMPERATURE * spread_T1, torch.inf)
    return torch.sigmoid((scores_TE - border_T1) / width_T1)


def compute_all(self: nn.Module, x_TD: Tensor, chosen_TK: Tensor, gates_TK: Tensor) -> Tensor:
    """Σ over the chosen experts of gate · expert(x), with a gradient for the choice itself.

    y = down · ((m + g·(P − stopgrad P)) ⊙ h) over the neurons h of all experts: m are the gates of the chosen experts
    and 0 elsewhere, P is `soft_choice`, g the token's mean gate. The value equals the checkpoint's. The gradient also
    reaches the router's rows of experts that were not chosen, but not the weights of those experts.
    Source: straight-through estimator, arXiv:1308.3432.

    Cost: E·N neurons per token; without copies of neurons, the dense FFN's cost.
    """
    gate_up_EMD: Tensor = self.gate_up_proj  # type: ignore[assignment]
    down_EDN: Tensor = self.down_proj  # type: ignore[assignment]
    gate_up_TEM = nn.functional.linear(x_TD, gate_up_EMD.flatten(0, 1)).view(-1, *gate_up_EMD.shape[:2])
    h_TEN = self._apply_gate(gate_up_TEM)  # type: ignore[operator]
    scores_TE: Tensor = self.router_scores  # type: ignore[assignment]
    gates_TE = torch.zeros_like(scores_TE, dtype=gates_TK.dtype).scatter(1, chosen_TK, gates_TK)
    if torch.is_grad_enabled():
        soft_TE = soft_choice(scores_TE, chosen_TK)
        gates_TE = gates_TE + gates_TK.detach().mean(1, keepdim=True) * (soft_TE - soft_TE.detach())
    gated_TEN = h_TEN * gates_TE[:, :, None].to(h_TEN.dtype)
    output_TD: Tensor = gated_TEN.flatten(1) @ down_EDN.transpose(1, 2).flatten(0, 1)
    return output_TD.to(x_TD.dtype)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, compute_all)


def show_scores(model: nn.Module) -> list[RemovableHandle]:
    """Pass each router's scores to the experts of its layer, where `compute_all` reads them.

    The model must be loaded with experts_implementation=IMPLEMENTATION, and every layer must have its own experts.
    Returns the hooks. Raises ConfigError: the experts are a pool.
    """
    handles = []
    for name in router_names(model):
        layer, _, router = name.rpartition(".")
        ffn = model.get_submodule(layer)
        if not hasattr(ffn, "experts"):
            what = "straight-through routers compute all experts for every token, in a pool those of all layers"
            do = "load it with grouped_mm and without show_scores, or carve with topology=per_layer"
            raise ConfigError(what, where="topology=global_pool in config.json", do=do)
        # In every pass, because replicas of nn.DataParallel are other modules.
        handles.append(ffn.register_forward_pre_hook(partial(_connect, router)))
        handles.append(ffn.get_submodule(router).register_forward_hook(_show))
        _connect(router, ffn)
    return handles


def _connect(router: str, ffn: nn.Module, _inputs: Any = ()) -> None:  # noqa: ANN401
    # Not as an attribute, which would make the experts a part of the router.
    vars(getattr(ffn, router))["shown_to"] = without_adapters(ffn.experts)  # type: ignore[arg-type]


def _show(router: nn.Module, _inputs: Any, output: Sequence[Tensor]) -> None:  # noqa: ANN401
    experts, logits_TE, bias_E = vars(router)["shown_to"], output[0], selection_bias(router)
    if bias_E is None:
        experts.router_scores = logits_TE
    else:  # TinyONN adds the bias to the logits, other architectures to their sigmoid
        # No isinstance: remote code is another class.
        on_logits = getattr(without_adapters(router), "bias_on_logits", False)
        experts.router_scores = (logits_TE if on_logits else logits_TE.sigmoid()) + bias_E
