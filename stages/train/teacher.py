"""The dense model as a teacher."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Lesson:
    """What the dense model makes of a batch."""

    logits_BTV: Tensor
    hidden: tuple[Tensor, ...]  # (B, T, D) before the first layer and after each; empty where nobody asked


@dataclass(frozen=True)
class Teacher:
    """The frozen dense model, and what is wanted of it."""

    model: PreTrainedModel
    hidden: bool

    @torch.no_grad()
    def teach(self, input_ids: Tensor, attention_mask: Tensor) -> Lesson:
        """Its predictions and, where wanted, its hidden states."""
        output = self.model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False, output_hidden_states=self.hidden
        )
        return Lesson(output.logits, output.hidden_states or ())
