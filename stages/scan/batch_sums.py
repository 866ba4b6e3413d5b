"""What one batch adds to the sums of a scan, computed where the layers are."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from models.capture.ffn_norms import unit_norms
from models.capture.ffn_probe import FFNGradients
from stages.scan.selection import mark_active_, pack_bits
from stages.stores.sums import ScanSums

# Sums of the forward pass, then of the backward pass: one row each in a layer's buffer.
FORWARD = ("sum_abs", "sum_sq", "max_abs", "active_count")
BACKWARD = ("sum_taylor", "grad_norm_gate", "grad_norm_up", "grad_norm_down")
ROWS = {name: row for row, name in enumerate(FORWARD + BACKWARD)}

# Elements worked on at once: what stays in a core's cache, or what fills a GPU.
_CHUNK = {"cpu": 2**17, "cuda": 2**26}


@dataclass(frozen=True)
class UnitRule:
    """How units are measured."""

    active_share: float
    active_threshold: float | None
    norm_product: str = "auto"


def sum_shapes(layers: int, width: int, reservoir: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and number formats of a scan's sums: float64, so that neither batch size nor length costs precision."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        name: ((layers, width), torch.int64 if name == "active_count" else torch.float64) for name in ROWS
    }
    # Token-major while scanning, so that a batch writes whole rows.
    shapes["bits_LRf"] = ((layers, reservoir, (width + 7) // 8), torch.uint8)
    return shapes


@dataclass
class LayerSums:
    """One layer's share of a batch."""

    rows_8F: Tensor  # fp32, in the order of ROWS
    bits_Rf: list[Tensor] = field(default_factory=list)  # reservoir rows in token order
    totals_B: Tensor | None = None  # every sample's Σ‖∇‖


class BatchSums:
    """One batch while it passes the model. Nothing waits for the device before `to_host`."""

    def __init__(self, layers: int, mask_BT: Bool[Tensor, "B T"], slots_BT: Int[Tensor, "B T"], rule: UnitRule) -> None:
        """Prepare on the CPU which tokens count (`mask_BT`) and which keep their bits (`slots_BT` >= 0)."""
        self.rule = rule
        self.layers: list[LayerSums | None] = [None] * layers
        self.padded = not bool(mask_BT.all())
        self.real_T = mask_BT.flatten().nonzero()[:, 0]
        slots_T = slots_BT.flatten()[self.real_T]
        self.drawn_R = (slots_T >= 0).nonzero()[:, 0]
        self.slots_R = slots_T[self.drawn_R]

    def add_hidden(self, layer: int, h_BTF: Float[Tensor, "B T F"]) -> None:
        """Sums of the forward pass."""
        sums = self._of(layer, h_BTF)
        total_abs, total_sq, peak, active = sums.rows_8F[: len(FORWARD)]
        for first, h_TF in self._real_rows(h_BTF):
            magnitude = h_TF.float().abs()
            total_abs += magnitude.sum(0)
            torch.maximum(peak, magnitude.amax(0), out=peak)
            total_sq += magnitude.square().sum(0)
            marks = mark_active_(magnitude, self.rule.active_share, self.rule.active_threshold)
            active += marks.sum(0)
            self._keep_bits(sums, marks, first)

    def add_gradients(self, layer: int, record: FFNGradients) -> None:
        """Sums of both passes."""
        self.add_hidden(layer, record.h_BTF)
        sums = self._of(layer, record.h_BTF)
        taylor = sums.rows_8F[ROWS["sum_taylor"]]
        for (_, h_TF), (_, grad_TF) in zip(
            self._real_rows(record.h_BTF), self._real_rows(record.h_grad_BTF), strict=True
        ):
            taylor += (h_TF.float() * grad_TF.float()).abs_().sum(0)
        totals_B = torch.zeros(len(record.h_BTF), device=taylor.device)
        for name, norms_BF in unit_norms(record, self.rule.norm_product).items():
            sums.rows_8F[ROWS[f"grad_norm_{name}"]] = norms_BF.sum(0)
            totals_B += norms_BF.sum(1)
        sums.totals_B = totals_B

    def to_host(self) -> "HostBatch":
        """Everything on the CPU, by one transfer for each device that holds layers."""
        parts = [part for part in self.layers if part is not None]
        assert len(parts) == len(self.layers), "a layer did not run"
        rows = _gather([part.rows_8F for part in parts])
        totals = _gather([part.totals_B for part in parts if part.totals_B is not None])
        bits = _gather([torch.cat(part.bits_Rf) for part in parts if part.bits_Rf])
        return HostBatch(torch.stack(rows), totals, torch.stack(bits) if bits else None, self.slots_R)

    def _of(self, layer: int, h_BTF: Tensor) -> LayerSums:
        if (sums := self.layers[layer]) is None:
            sums = LayerSums(torch.zeros(len(ROWS), h_BTF.shape[-1], device=h_BTF.device))
            self.layers[layer] = sums
        return sums

    def _real_rows(self, values_BTF: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Unmasked tokens, a cacheful at a time, with the number of the first among them."""
        flat_TF = values_BTF.flatten(0, 1)
        step = max(1, _CHUNK.get(flat_TF.device.type, 2**20) // flat_TF.shape[1])
        if self.padded and self.real_T.device != flat_TF.device:
            self.real_T = self.real_T.to(flat_TF.device, non_blocking=True)
        for first in range(0, len(self.real_T), step):
            chosen = self.real_T[first : first + step] if self.padded else slice(first, first + step)
            yield first, flat_TF[chosen]

    def _keep_bits(self, sums: LayerSums, marks_TF: Tensor, first: int) -> None:
        begin, end = torch.searchsorted(self.drawn_R, torch.tensor([first, first + len(marks_TF)])).tolist()
        if begin < end:
            chosen = (self.drawn_R[begin:end] - first).to(marks_TF.device, non_blocking=True)
            sums.bits_Rf.append(pack_bits(marks_TF[chosen]))


@dataclass(frozen=True)
class HostBatch:
    """One batch on the CPU."""

    rows_L8F: Tensor
    totals: list[Tensor]  # per layer (B,); empty after a forward-only pass
    bits_LRf: Tensor | None  # None when no token of the batch was drawn
    slots_R: Tensor

    def sample_totals(self) -> Float[Tensor, "B"]:
        """Every sample's Σ‖∇‖ over all layers."""
        return torch.stack(self.totals).sum(0)

    def add_to(self, sums: ScanSums, *, number: int, counters: dict[str, float], loss_scale: float = 1.0) -> None:
        """Add the batch to running sums, as batch `number`; gradients are divided by the scale their loss had."""
        for name, row in ROWS.items():
            values_LF, total = self.rows_L8F[:, row], sums.tensors[name]
            if name in BACKWARD:
                total += values_LF.double() / loss_scale
            elif name == "max_abs":
                torch.maximum(total, values_LF.double(), out=total)
            else:
                total += values_LF.to(total.dtype)
        if self.bits_LRf is not None:
            sums.tensors["bits_LRf"][:, self.slots_R] = self.bits_LRf
        for name, count in counters.items():
            sums.counters[name] = sums.counters.get(name, 0) + count
        sums.done.add(number)


def _gather(tensors: list[Tensor]) -> list[Tensor]:
    """The same tensors on the CPU; those of one device travel together."""
    devices = {tensor.device for tensor in tensors}
    host: dict[int, Tensor] = {}
    for device in devices:
        places = [place for place, tensor in enumerate(tensors) if tensor.device == device]
        moved = torch.stack([tensors[place] for place in places]).cpu()
        host.update(zip(places, moved, strict=True))
    return [host[place] for place in range(len(tensors))]
