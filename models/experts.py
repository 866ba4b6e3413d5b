"""Experts as tensors of a layer, and one expert as a module."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.activations import ACT2FN


@dataclass(frozen=True)
class LayerExperts:
    """Slices of one layer's dense FFN, as they are in the dense checkpoint: nothing scaled."""

    gate_END: Float[Tensor, "E N D"]
    up_END: Float[Tensor, "E N D"]
    down_EDN: Float[Tensor, "E D N"]
    shared_gate_SD: Float[Tensor, "S D"]  # the always-on units
    shared_up_SD: Float[Tensor, "S D"]
    shared_down_DS: Float[Tensor, "D S"]


class TinyONNExpert(nn.Module):
    """A standard gated FFN of N neurons: down(act(gate(x)) · up(x))."""

    def __init__(self, hidden_size: int, n: int, hidden_act: str = "silu") -> None:
        """Three Linear layers without bias."""
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, n, bias=False)
        self.up_proj = nn.Linear(hidden_size, n, bias=False)
        self.down_proj = nn.Linear(n, hidden_size, bias=False)
        self.act_fn: nn.Module = ACT2FN[hidden_act]

    @classmethod
    def from_tensors(
        cls,
        gate_ND: Float[Tensor, "N D"],
        up_ND: Float[Tensor, "N D"],
        down_DN: Float[Tensor, "D N"],
        hidden_act: str = "silu",
    ) -> "TinyONNExpert":
        """An expert that holds these very tensors."""
        n, hidden_size = gate_ND.shape
        with torch.device("meta"):
            expert = cls(hidden_size, n, hidden_act)
        expert.gate_proj.weight = nn.Parameter(gate_ND)
        expert.up_proj.weight = nn.Parameter(up_ND)
        expert.down_proj.weight = nn.Parameter(down_DN)
        return expert

    def forward(self, x: Float[Tensor, "*T D"]) -> Float[Tensor, "*T D"]:
        """The expert's contribution to each token."""
        output: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return output
