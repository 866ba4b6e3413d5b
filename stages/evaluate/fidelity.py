"""How closely each carved FFN follows the dense one, and how its router spreads the tokens."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from models.routing import choose_experts
from stages.calibration.carved_ffn import expert_grams, output_norms
from stages.evaluate.baselines import LayerFacts
from stages.routing.expert_outputs import error_drops


@dataclass
class LayerFidelity:
    """Sums over the tokens seen so far; on the carved model's own inputs."""

    top_k: int
    load_E: Tensor
    grams_ENN: Tensor | None  # None: of a global pool, which has the error oracle instead
    missed: float = 0.0
    wanted: float = 0.0
    agreed: int = 0
    chosen: int = 0

    @classmethod
    def start(cls, facts: LayerFacts) -> "LayerFidelity":
        """Nothing seen yet."""
        load_E = torch.zeros(len(facts.units_EN), device=facts.router.rows_ED.device)
        return cls(facts.shape.top_k, load_E, None if facts.pool else expert_grams(facts.ffn, facts.units_EN))

    def add(
        self,
        facts: LayerFacts,
        x_BTD: Float[Tensor, "B T D"],
        output_BTD: Float[Tensor, "B T D"],
        mask_BT: Bool[Tensor, "B T"],
    ) -> None:
        """Compare one batch with the dense FFN and with the output oracle (of a pool: the error oracle).

        `facts` are handed in each time: of a model larger than its device, weights are not to be kept.
        """
        x_TD = x_BTD[mask_BT]
        h_TF = facts.ffn.hidden(x_TD)
        wanted_TD = facts.ffn.output(h_TF)
        self.missed += float((wanted_TD - output_BTD[mask_BT]).double().square().sum())
        self.wanted += float(wanted_TD.double().square().sum())
        chosen_TK = facts.router.choose(x_TD.float(), self.top_k)
        self.load_E += torch.bincount(chosen_TK.flatten(), minlength=len(self.load_E))
        best_TK = choose_experts(self.oracle(facts, x_TD.float(), h_TF, wanted_TD.float()), self.top_k)
        self.agreed += int((chosen_TK[:, :, None] == best_TK[:, None, :]).sum())
        self.chosen += chosen_TK.numel()

    def oracle(
        self,
        facts: LayerFacts,
        x_TD: Float[Tensor, "T D"],
        h_TF: Float[Tensor, "T F"],
        wanted_TD: Float[Tensor, "T D"],
    ) -> Float[Tensor, "T E"]:
        """How much every expert gives: the norm of its output, or in a pool what it alone takes off the error."""
        if self.grams_ENN is not None:
            return output_norms(self.grams_ENN, h_TF, facts.units_EN)
        assert facts.pool is not None, "see start"
        return error_drops(facts.pool, x_TD, wanted_TD)

    @property
    def error(self) -> float:
        """Σ‖dense − MoE‖² / Σ‖dense‖²; 0 for an FFN that gives nothing."""
        return self.missed / self.wanted if self.wanted else 0.0

    @property
    def agreement(self) -> float:
        """Share of the router's choices that the oracle would make too."""
        return self.agreed / self.chosen

    @property
    def imbalance(self) -> float:
        """Largest load over the mean load."""
        return float(self.load_E.max() / self.load_E.mean())
