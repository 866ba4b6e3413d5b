"""The sparse FFN of one layer: a router, its experts, and the shared FFN that every token passes.

This file is copied into the checkpoint's folder: it needs only torch and transformers, 4.57 or later.
Shapes: T tokens, D hidden size, E experts, N neurons per expert, K experts per token, S always-on neurons.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.activations import ACT2FN

from .configuration_tiny_onn import TinyONNConfig

try:
    from transformers.integrations.moe import use_experts_implementation
except ImportError:  # transformers 4 has no kernels to choose from

    def use_experts_implementation(experts_class: type) -> type:
        """Return the class unchanged."""
        return experts_class


class TinyONNRouter(nn.Module):
    """Chooses K experts per token and computes their gates, the sigmoid of their logits."""

    e_score_correction_bias: Tensor
    bias_on_logits = True  # other architectures add it to the scores

    def __init__(self, config: TinyONNConfig) -> None:
        """Weights are left uninitialised, the selection bias is 0."""
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.routed_scaling_factor = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts, dtype=torch.float32))

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Route tokens.

        Returns:
            ``(T, E)`` logits; ``(T, K)`` gates; ``(T, K)`` experts, those of highest logit + selection bias.
        Numerics: fp32 (fp64 for fp64 inputs), also under autocast.
        """
        # Autocast does not support the meta device; any other device serves here.
        device = "cpu" if x_TD.device.type == "meta" else x_TD.device.type
        with torch.autocast(device, enabled=False):
            wide = torch.promote_types(x_TD.dtype, torch.float32)
            logits_TE = linear(x_TD.to(wide), self.weight.to(wide))
            biased_TE = logits_TE.detach() + self.e_score_correction_bias
            chosen_TK = biased_TE.topk(self.top_k, dim=-1, sorted=False).indices
            gates_TK = logits_TE.gather(1, chosen_TK).sigmoid()
            if self.norm_topk_prob:
                gates_TK = gates_TK / (gates_TK.sum(-1, keepdim=True) + 1e-20)
            return logits_TE, gates_TK * self.routed_scaling_factor, chosen_TK


class Quotient(nn.Module):
    """act(z) / z: an FFN without a gate, down(act(z)), is one with equal gate and up, down(act(z) / z · z)."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        """`act` is 0 at 0."""
        super().__init__()
        self.act = act

    def forward(self, z: Tensor) -> Tensor:
        """The quotient; 0 at 0, where its factor z is 0."""
        quotient: Tensor = self.act(z) / torch.where(z == 0, 1, z)
        return quotient


def find_activation(place: str, ffn: nn.Module) -> Callable[[Tensor], Tensor]:
    """The activation of an FFN: a path in it, or after a colon a name in ACT2FN; after a slash, its quotient."""
    if place.startswith("/"):
        return Quotient(find_activation(place[1:], ffn))
    found: Callable[[Tensor], Tensor] = ACT2FN[place[1:]] if place.startswith(":") else ffn.get_submodule(place)
    return found


@use_experts_implementation
class TinyONNExperts(nn.Module):
    """E gated FFNs of N neurons as two 3-D parameters."""

    act_fn: Callable[[Tensor], Tensor]

    def __init__(self, config: TinyONNConfig, act_fn: Callable[[Tensor], Tensor]) -> None:
        """Weights are left uninitialised."""
        super().__init__()
        experts, n, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * n, hidden))  # rows of gate, then rows of up
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, n))
        object.__setattr__(self, "act_fn", act_fn)  # the layer holds what it learns

    def forward(self, x_TD: Tensor, chosen_TK: Tensor, gates_TK: Tensor) -> Tensor:
        """Σ over the chosen experts of gate · expert(x), expert by expert.

        This is experts_implementation="eager", the only one in transformers 4.
        """
        output_TD = torch.zeros_like(x_TD, dtype=gates_TK.dtype)
        # One sort for all experts, so that the CPU waits for a GPU only once.
        expert_P, place_P = chosen_TK.flatten().sort(stable=True)
        counts = expert_P.new_zeros(self.num_experts).scatter_add_(0, expert_P, torch.ones_like(expert_P)).tolist()
        # `unbind`, because indexing in the loop would make the backward pass quadratic in E.
        weights = self.gate_up_proj.unbind(), self.down_proj.unbind()
        for gate_up, down, places in zip(*weights, torch.split(place_P, counts), strict=True):
            if len(places):
                tokens = places // chosen_TK.shape[1]
                gate_tN, up_tN = linear(x_TD[tokens], gate_up).chunk(2, dim=-1)
                expert_tD = linear(self.act_fn(gate_tN) * up_tN, down)
                output_TD = output_TD.index_add(0, tokens, expert_tD * gates_TK.flatten()[places, None])
        return output_TD.to(x_TD.dtype)


class TinyONNSharedFFN(nn.Module):
    """The gated FFN of the always-on neurons: down(act(gate(x)) · up(x))."""

    act_fn: Callable[[Tensor], Tensor]

    def __init__(self, hidden_size: int, n: int, act: str | Callable[[Tensor], Tensor] = "silu") -> None:
        """Three Linear layers without bias; `act` is a name in transformers' ACT2FN, or a function."""
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, n, bias=False)
        self.up_proj = nn.Linear(hidden_size, n, bias=False)
        self.down_proj = nn.Linear(n, hidden_size, bias=False)
        object.__setattr__(self, "act_fn", ACT2FN[act] if isinstance(act, str) else act)

    def forward(self, x: Tensor) -> Tensor:
        """The output for (..., D), without a gate."""
        output: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return output


class TinyONNSparseFFN(nn.Module):
    """Replaces the FFN of a dense decoder layer."""

    def __init__(
        self, config: TinyONNConfig, act_fn: Callable[[Tensor], Tensor], pool: Mapping[str, nn.Module] | None = None
    ) -> None:
        """`pool`: the modules of the model, whose `experts` all layers share; None: the layer has its own."""
        super().__init__()
        self.gate = TinyONNRouter(config)
        own, place = act_fn.act if isinstance(act_fn, Quotient) else act_fn, config.ffn["activation"].strip("/")
        if isinstance(own, nn.Module) and "." not in place and ":" not in place:
            self.add_module(place, own)  # by the dense model's name
        if pool is None:
            self.experts = TinyONNExperts(config, act_fn)
        shared = config.shared_intermediate_size
        self.shared_experts = TinyONNSharedFFN(config.hidden_size, shared, act_fn) if shared else None
        # In a mapping, the pool is no submodule of this layer: its parameters are counted, saved and trained once. Each
        # pass looks it up, since adapters and FSDP replace the model's module by one that wraps it.
        self._pool = pool

    def forward(self, x: Tensor) -> Tensor:
        """The FFN's output for (..., D)."""
        experts = self.experts if self._pool is None else self._pool["experts"]
        x_TD = x.reshape(-1, x.shape[-1])
        _, gates_TK, chosen_TK = self.gate(x_TD)
        # The pool may be on another device than this layer.
        output: Tensor = experts(x_TD, chosen_TK, gates_TK).to(x.device).view(x.shape)
        return output if self.shared_experts is None else output + self.shared_experts(x)
