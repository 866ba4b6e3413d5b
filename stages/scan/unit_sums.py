"""Running sums of the scan, and how one batch adds to them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from models.capture.ffn_probe import FFNGradients
from models.capture.gradient_norms import gram, prefer_gram, row_norms_direct, row_norms_from_gram


def active_units(h_TF: Float[Tensor, "T F"], share: float, threshold: float | None) -> Bool[Tensor, "T F"]:
    """Which units are active for which token: in the token's top `share` of |h|, or above an absolute threshold."""
    magnitude = h_TF.abs()
    if threshold is not None:
        return magnitude > threshold
    count = max(1, round(share * h_TF.shape[1]))
    lowest_kept = magnitude.topk(count, dim=1).values[:, -1:]
    return (magnitude >= lowest_kept) & (magnitude > 0)


@dataclass
class UnitSums:
    """Sums of every layer; float64 on the CPU, so that neither batch size nor length costs precision."""

    tensors: dict[str, Tensor]
    share: float
    threshold: float | None
    norm_product: str = "auto"

    @classmethod
    def zeros(
        cls,
        layers: int,
        width: int,
        reservoir: int,
        *,
        share: float,
        threshold: float | None,
        norm_product: str = "auto",
    ) -> "UnitSums":
        """Start from nothing."""
        names = ["sum_abs", "sum_sq", "max_abs", "sum_taylor", "grad_norm_gate", "grad_norm_up", "grad_norm_down"]
        tensors = {name: torch.zeros(layers, width, dtype=torch.float64) for name in names}
        tensors["active_count"] = torch.zeros(layers, width, dtype=torch.int64)
        # Token-major while scanning, so that a batch writes whole rows.
        tensors["bits_LRf"] = torch.zeros(layers, reservoir, (width + 7) // 8, dtype=torch.uint8)
        return cls(tensors, share, threshold, norm_product)

    def add_hidden(
        self,
        layer: int,
        h_BTF: Float[Tensor, "B T F"],
        mask_BT: Bool[Tensor, "B T"],
        slots_BT: Int[Tensor, "B T"],
    ) -> None:
        """Add one batch of activations.

        Args:
            layer: which FFN.
            h_BTF: hidden activations.
            mask_BT: real tokens.
            slots_BT: reservoir slot of each token, -1 for none.
        """
        h_TF = h_BTF[mask_BT].float()
        magnitude = h_TF.abs()
        active = active_units(h_TF, self.share, self.threshold)
        self._add("sum_abs", layer, magnitude.sum(0))
        self._add("sum_sq", layer, h_TF.square().sum(0))
        self._add("active_count", layer, active.sum(0))
        peak = self.tensors["max_abs"][layer]
        torch.maximum(peak, magnitude.amax(0).to(peak), out=peak)
        slots = slots_BT[mask_BT]
        chosen = slots >= 0
        bits = np.packbits(active[chosen].cpu().numpy(), axis=1)
        self.tensors["bits_LRf"][layer, slots[chosen].cpu()] = torch.from_numpy(bits)

    def add_gradients(self, layer: int, record: FFNGradients, mask_BT: Bool[Tensor, "B T"]) -> Float[Tensor, "B"]:
        """Add one batch of gradients; returns each sample's Σ‖∇‖ in this layer, to be checked by the caller."""
        taylor = (record.h_BTF.float() * record.h_grad_BTF.float())[mask_BT].abs().sum(0)
        self._add("sum_taylor", layer, taylor)
        totals = torch.zeros(len(mask_BT))
        for name, norms_BF in self._norms(record).items():
            self._add(name, layer, norms_BF.double().sum(0))
            totals += norms_BF.sum(1).cpu()
        return totals

    def _norms(self, record: FFNGradients) -> Mapping[str, Float[Tensor, "B F"]]:
        (_, length, hidden_size), width = record.x_BTD.shape, record.h_BTF.shape[-1]
        if prefer_gram(self.norm_product, length, hidden_size, width):
            inputs, outputs = gram(record.x_BTD), gram(record.out_grad_BTD)
            return {
                "grad_norm_gate": row_norms_from_gram(inputs, record.gate_grad_BTF),
                "grad_norm_up": row_norms_from_gram(inputs, record.up_grad_BTF),
                "grad_norm_down": row_norms_from_gram(outputs, record.h_BTF),
            }
        return {
            "grad_norm_gate": row_norms_direct(record.x_BTD, record.gate_grad_BTF),
            "grad_norm_up": row_norms_direct(record.x_BTD, record.up_grad_BTF),
            "grad_norm_down": row_norms_direct(record.out_grad_BTD, record.h_BTF),
        }

    def _add(self, name: str, layer: int, values: Float[Tensor, "F"] | Int[Tensor, "F"]) -> None:
        total = self.tensors[name][layer]
        total += values.to(total)
