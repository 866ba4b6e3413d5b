"""One MoE layer as an obvious loop over experts: the reference the fast paths are held against.

y(x) = Σ_{s always on} h_s·d_s + Σ_{e chosen} g_e·Σ_{i∈e} h_i·d_i, with gates relative to equal logits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from models.experts import LayerExperts
from models.gating import GateKind, relative_gates
from models.routing import LinearRouter


@dataclass(frozen=True)
class ExpertLoop:
    """Experts, the dense units they came from, and the router that chooses K of them."""

    experts: LayerExperts
    units_EN: Int[Tensor, "E N"]
    always_S: Int[Tensor, "S"]
    router: LinearRouter
    top_k: int
    width: int  # F
    act: Callable[[Tensor], Tensor]
    gate: GateKind = GateKind.CONSTANT

    def __call__(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """The layer's output."""
        output_TD = torch.zeros_like(x_TD)
        for tokens, _, h_tN, down_DN in self._parts(x_TD):
            output_TD[tokens] += h_tN @ down_DN.T
        return output_TD

    def run(self, x_TD: Float[Tensor, "T D"]) -> tuple[Float[Tensor, "T F"], Float[Tensor, "T D"]]:
        """Per dense unit, the sum of its active copies' activations; and the output."""
        features_TF = x_TD.new_zeros(len(x_TD), self.width)
        output_TD = torch.zeros_like(x_TD)
        for tokens, units_N, h_tN, down_DN in self._parts(x_TD):
            features_TF[tokens[:, None], units_N] += h_tN
            output_TD[tokens] += h_tN @ down_DN.T
        return features_TF, output_TD

    def with_change(self, change_DF: Float[Tensor, "D F"]) -> "ExpertLoop":
        """Add to every unit's down column, in all its copies."""
        return replace(
            self,
            experts=replace(
                self.experts,
                down_EDN=self.experts.down_EDN + change_DF[:, self.units_EN.long()].movedim(1, 0),
                shared_down_DS=self.experts.shared_down_DS + change_DF[:, self.always_S.long()],
            ),
        )

    def always_on_output(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """What the always-on units give."""
        experts = self.experts
        return self.hidden(x_TD, experts.shared_gate_SD, experts.shared_up_SD) @ experts.shared_down_DS.T

    def expert_outputs(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T E D"]:
        """What every expert would give for every token."""
        experts = self.experts
        output_TED = x_TD.new_empty(len(x_TD), len(experts.gate_END), x_TD.shape[1])
        for index, down_DN in enumerate(experts.down_EDN):
            output_TED[:, index] = self.hidden(x_TD, experts.gate_END[index], experts.up_END[index]) @ down_DN.T
        return output_TED

    # Neither tokens nor units repeat within an expert, so `x[index] += y` loses nothing; index_add_ goes row by row.
    def _parts(self, x_TD: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Tokens, units, activations and down columns of the always-on units and of every expert that is chosen."""
        experts = self.experts
        everyone = torch.arange(len(x_TD), device=x_TD.device)
        if len(self.always_S):
            shared_TS = self.hidden(x_TD, experts.shared_gate_SD, experts.shared_up_SD)
            yield everyone, self.always_S.long(), shared_TS, experts.shared_down_DS
        chosen_TK = self.router.choose(x_TD, self.top_k)
        gates_TK = relative_gates(self.gate, x_TD @ self.router.rows_ED.T, chosen_TK)
        for index, units_N in enumerate(self.units_EN.long()):
            tokens, slots = (chosen_TK == index).nonzero().unbind(1)
            h_tN = self.hidden(x_TD[tokens], experts.gate_END[index], experts.up_END[index])
            yield tokens, units_N, h_tN * gates_TK[tokens, slots, None], experts.down_EDN[index]

    def hidden(self, x_tD: Tensor, gate_ND: Tensor, up_ND: Tensor) -> Tensor:
        """Activations of an expert's units."""
        return self.act(x_tD @ gate_ND.T) * (x_tD @ up_ND.T)
