"""The sums of a scan: how strongly and how often each neuron fires, its Taylor score and gradients."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from numpy.typing import NDArray
from torch import Tensor

from instruments.errors import CheckpointError
from instruments.ffn_probe import FFNGradients, neuron_norms
from instruments.tensors import to_host
from models.device import send
from stages.accumulators.sums import ScanSums
from stages.scan.config import ScanConfig
from stages.text.batches import TokenBatch

# Tokens per step of `sum_tokens`.
_CHUNK = 4096


def sum_tokens(
    h_MF: Float[Tensor, "M F"], grad_MF: Float[Tensor, "M F"] | None, rows_T: Int[Tensor, "T"], scan: ScanConfig
) -> tuple[Float[Tensor, "5 F"], Float[Tensor, "T"]]:
    """Σ|h|, Σh², max|h|, the number of tokens for which a neuron is active, and Σ|h·∂L/∂h|.

    `rows_T` selects the tokens that count from the M rows (padding included); without gradients the last sum is 0.

    Returns:
        Float64 sums on the same device, and the activity limit of every token (see `activity_limits`).

    Numerics: fp32 within 4096 tokens, float64 beyond.
    """
    sums_5F = torch.zeros(5, h_MF.shape[1], dtype=torch.float64, device=h_MF.device)
    limits = []
    for rows in torch.split(rows_T, _CHUNK):
        magnitude_TF = h_MF[rows].float().abs()
        limit_T1 = activity_limits(magnitude_TF, scan)
        sums_5F[0] += magnitude_TF.sum(0)
        sums_5F[1] += magnitude_TF.square().sum(0)
        sums_5F[2] = torch.maximum(sums_5F[2], magnitude_TF.amax(0))
        sums_5F[3] += (magnitude_TF >= limit_T1).sum(0)
        if grad_MF is not None:
            sums_5F[4] += magnitude_TF.mul_(grad_MF[rows]).abs_().sum(0)
        limits.append(limit_T1[:, 0])
    return sums_5F, torch.cat(limits)


def activity_limits(magnitude_TF: Float[Tensor, "T F"], scan: ScanConfig) -> Float[Tensor, "T 1"]:
    """For every token, the smallest |h| that counts as active: ties included, zeros never."""
    smallest = torch.finfo(torch.float32).tiny
    if scan.active_threshold is not None:
        limit = torch.full((len(magnitude_TF), 1), scan.active_threshold, device=magnitude_TF.device)
        return limit.nextafter(torch.full_like(limit, torch.inf)).clamp_min(smallest)
    count = scan.active_count(magnitude_TF.shape[1])
    return magnitude_TF.topk(count, dim=1, sorted=False).values.amin(1, keepdim=True).clamp_min(smallest)


def pack_bits(active_RF: Bool[Tensor, "R F"]) -> UInt8[Tensor, "R f"]:
    """Pack booleans into bits, (R, ceil(F/8)) uint8, most significant bit first as in numpy.packbits."""
    padded = torch.nn.functional.pad(active_RF.to(torch.uint8), (0, -active_RF.shape[1] % 8))
    places = torch.arange(7, -1, -1, dtype=torch.uint8, device=active_RF.device)
    packed: Tensor = (padded.view(len(padded), padded.shape[1] // 8, 8) << places).sum(-1, dtype=torch.uint8)
    return packed


# Tokens per partial sum. Fixed, so that results do not depend on the number of threads.
_SPAN = 128


def sum_tokens_numpy(
    h_MF: Float[Tensor, "M F"], grad_MF: Float[Tensor, "M F"] | None, rows_T: Int[Tensor, "T"], scan: ScanConfig
) -> tuple[Float[Tensor, "5 F"], Float[Tensor, "T"]]:
    """`sum_tokens` on the CPU, where numpy selects the largest values faster than torch.

    Numerics: float64 over spans of 128 tokens, added in order.
    """
    h, grad = h_MF.detach().float().numpy(), None if grad_MF is None else grad_MF.detach().float().numpy()
    spans = np.split(rows_T.numpy(), range(_SPAN, len(rows_T), _SPAN))
    with ThreadPoolExecutor(min(torch.get_num_threads(), len(spans))) as threads:
        parts = list(threads.map(lambda rows: _sum_span(h[rows], None if grad is None else grad[rows], scan), spans))
    sums_P5F = np.stack([sums_5F for sums_5F, _ in parts])
    total_5F = sums_P5F.sum(0)
    total_5F[2] = sums_P5F[:, 2].max(0)
    return torch.from_numpy(total_5F), torch.from_numpy(np.concatenate([limits for _, limits in parts]))


def _sum_span(
    h_TF: NDArray[np.float32], grad_TF: NDArray[np.float32] | None, scan: ScanConfig
) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    magnitude_TF = np.abs(h_TF)
    if scan.active_threshold is None:
        lowest = h_TF.shape[1] - scan.active_count(h_TF.shape[1])
        limits = np.partition(magnitude_TF, lowest, axis=1)[:, lowest]
    else:
        limits = np.full(len(h_TF), np.nextafter(np.float32(scan.active_threshold), np.float32(np.inf)))
    limits = np.maximum(limits, np.finfo(np.float32).tiny)
    sums_5F = np.zeros((5, h_TF.shape[1]))
    sums_5F[2] = magnitude_TF.max(0)
    sums_5F[3] = np.count_nonzero(magnitude_TF >= limits[:, None], axis=0)
    # Over its first axis, numpy adds row by row.
    exact_TF = magnitude_TF.astype(np.float64)
    sums_5F[0] = exact_TF.sum(0)
    sums_5F[1] = np.square(exact_TF, out=exact_TF).sum(0)
    if grad_TF is not None:
        sums_5F[4] = np.abs(h_TF * grad_TF).sum(0, dtype=np.float64)
    return sums_5F, limits


# Sums of the forward pass and of the backward pass; each is one row of a layer's buffer.
FORWARD = ("sum_abs", "sum_sq", "max_abs", "active_count")
BACKWARD = ("sum_taylor", "grad_norm_gate", "grad_norm_up", "grad_norm_down")
ROWS = {name: row for row, name in enumerate(FORWARD + BACKWARD)}


def sum_shapes(layers: int, width: int, reservoir: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and number formats of a scan's sums; float64, so that a long scan loses no precision."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        name: ((layers, width), torch.int64 if name == "active_count" else torch.float64) for name in ROWS
    }
    # Token-major during the scan, so that a batch writes whole rows.
    shapes["bits_LRf"] = ((layers, reservoir, (width + 7) // 8), torch.uint8)
    return shapes


class LayerSums(NamedTuple):
    """The sums of one layer over one batch."""

    rows_8F: Tensor  # float64, in the order of ROWS
    bits_Rf: Tensor  # reservoir rows in token order
    totals_B: Tensor  # Σ‖∇‖ of each sample


class BatchSums:
    """Sums of one batch during its pass through the model; nothing in it waits for the device."""

    def __init__(
        self, layers: int, mask_BT: Bool[Tensor, "B T"], slots_BT: Int[Tensor, "B T"], scan: ScanConfig
    ) -> None:
        """`mask_BT` marks the tokens that count; tokens with `slots_BT` >= 0 go to the reservoir. Both on the CPU."""
        self.scan = scan
        self.layers: list[LayerSums | None] = [None] * layers
        self.real_T = torch.from_numpy(np.flatnonzero(mask_BT.numpy()))
        slots_T = slots_BT.flatten()[self.real_T]
        self.drawn_R = torch.from_numpy(np.flatnonzero(slots_T.numpy() >= 0))
        self.slots_R = slots_T[self.drawn_R]
        self._rows: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def add_hidden(self, layer: int, h_BTF: Float[Tensor, "B T F"]) -> None:
        """Add one layer's activations: sums of the forward pass."""
        self._add_tokens(layer, h_BTF, None)

    def add_gradients(self, layer: int, record: FFNGradients) -> None:
        """Add one layer's activations and gradients: sums of both passes."""
        sums = self._add_tokens(layer, record.h_BTF, record.h_grad_BTF)
        for name, norms_BF in neuron_norms(record, "auto").items():
            sums.rows_8F[ROWS[f"grad_norm_{name}"]] = norms_BF.double().sum(0)
            sums.totals_B.add_(norms_BF.sum(1))

    def join(self, losses_B: Float[Tensor, "B"]) -> "ScannedBatch":
        """The sums of all layers, on the device of the losses."""
        parts = [part for part in self.layers if part is not None]
        if idle := [str(layer) for layer, part in enumerate(self.layers) if part is None]:
            what, do = "the model does not run these layers on text alone", "choose a model whose layers all read text"
            raise CheckpointError(what, where=f"layer {', '.join(idle)}", do=do)
        rows_L8F, bits_LRf, totals_LB = (
            torch.stack([tensor.to(losses_B.device) for tensor in kind]) for kind in zip(*parts, strict=True)
        )
        return ScannedBatch(losses_B, rows_L8F, bits_LRf, totals_LB.sum(0), self.slots_R)

    def _add_tokens(self, layer: int, h_BTF: Tensor, grad_BTF: Tensor | None) -> LayerSums:
        sum_up = sum_tokens_numpy if h_BTF.device.type == "cpu" else sum_tokens
        h_MF, grad_MF = h_BTF.flatten(0, 1), None if grad_BTF is None else grad_BTF.flatten(0, 1)
        rows_T, drawn_R = self._rows_on(h_BTF.device)
        found_5F, limits_T = sum_up(h_MF, grad_MF, rows_T, self.scan)
        rows_8F = torch.zeros(len(ROWS), h_MF.shape[1], dtype=torch.float64, device=h_MF.device)
        rows_8F[: len(found_5F)] = found_5F
        drawn_RF = h_MF[rows_T[drawn_R]].float().abs() >= limits_T[drawn_R, None]
        self.layers[layer] = sums = LayerSums(
            rows_8F, pack_bits(drawn_RF), torch.zeros(len(h_BTF), device=h_BTF.device)
        )
        return sums

    def _rows_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Rows of the tokens that count, and which of these go to the reservoir."""
        if device not in self._rows:
            self._rows[device] = send(self.real_T, device, torch.int64), send(self.drawn_R, device, torch.int64)
        return self._rows[device]


@dataclass(frozen=True)
class ScannedBatch:
    """The sums of one batch, on the device of its losses."""

    losses_B: Tensor
    rows_L8F: Tensor
    bits_LRf: Tensor
    totals_B: Tensor  # Σ‖∇‖ of each sample over all layers; zero after a forward-only pass
    slots_R: Tensor  # on the CPU

    def fetch(self) -> tuple[Float[Tensor, "B"], Float[Tensor, "B"]]:
        """Losses, and Σ‖∇‖ over all layers, on the CPU."""
        losses_B, totals_B = to_host([self.losses_B, self.totals_B])
        return losses_B, totals_B


# Receives a batch, its losses, and Σ‖∇‖ of its samples.
Check = Callable[[TokenBatch, Tensor, Tensor], None]


class RunningSums:
    """The sums of a scan on its device; only `drain` waits for the device and changes the host's sums.

    Numerics: bitwise those of adding every batch on the host, since the additions and their order are the same.
    """

    def __init__(self, sums: ScanSums, device: torch.device) -> None:
        """`sums` are the host's."""
        self.sums = sums
        rows_L8F = torch.stack([sums.tensors[name].double() for name in ROWS], dim=1)
        self._rows_L8F = send(rows_L8F, device, torch.float64)
        self._waiting: list[tuple[int, TokenBatch, bool, ScannedBatch]] = []

    def add(
        self, number: int, batch: TokenBatch, found: ScannedBatch, *, checked: bool, loss_scale: float = 1.0
    ) -> None:
        """Add batch `number`, its gradients divided by `loss_scale`; `drain` checks it unless it is `checked`."""
        largest = ROWS["max_abs"]
        found.rows_L8F[:, ROWS[BACKWARD[0]] :] /= loss_scale
        largest_LF = torch.maximum(self._rows_L8F[:, largest], found.rows_L8F[:, largest])
        self._rows_L8F += found.rows_L8F
        self._rows_L8F[:, largest] = largest_LF
        # Its sums are not kept.
        self._waiting.append((number, batch, checked, replace(found, rows_L8F=largest_LF[:0])))

    def drain(self, check: Check) -> None:
        """Copy everything to the host in one transfer, and to the host's sums if `check` accepts each batch."""
        kept = [found for *_, found in self._waiting]
        tensors = [tensor for found in kept for tensor in (found.losses_B, found.totals_B, found.bits_LRf)]
        rows_L8F, *fetched = to_host([self._rows_L8F, *tensors])
        batches = [*zip(self._waiting, fetched[::3], fetched[1::3], fetched[2::3], strict=True)]
        for (_, batch, checked, _), losses_B, totals_B, _ in batches:
            if not checked:
                check(batch, losses_B, totals_B)
        for name, row in ROWS.items():
            self.sums.tensors[name].copy_(rows_L8F[:, row])
        for (number, batch, _, found), losses_B, _, bits_LRf in batches:
            self.sums.tensors["bits_LRf"][:, found.slots_R] = bits_LRf
            counts = {"tokens": batch.tokens, "samples": len(batch.names), "loss_sum": float(losses_B.double().sum())}
            for name, count in counts.items():
                self.sums.counters[name] = self.sums.counters.get(name, 0) + count
            self.sums.done.add(number)
        self._waiting = []
