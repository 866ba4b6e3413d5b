"""The sums of one batch of a scan: how strongly and how often each neuron fires, its Taylor score and gradients."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from inspect import unwrap
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from instruments.ffn_probe import FFNGradients, neuron_norms
from instruments.tensors import to_host
from stages.accumulators.sums import ScanSums
from stages.scan.config import ScanConfig

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
# Mask without the sign bit: as integers, masked floats have the order of their magnitudes. The smallest normal float.
_MAGNITUDE, _SMALLEST = np.int32(0x7FFFFFFF), np.int32(0x00800000)
# First step of the search, a sixteenth of an octave: limits of neighbouring tokens often differ by less.
_STEP = np.int32(1 << 19)


def sum_tokens_compiled(
    h_MF: Float[Tensor, "M F"], grad_MF: Float[Tensor, "M F"] | None, rows_T: Int[Tensor, "T"], scan: ScanConfig
) -> tuple[Float[Tensor, "5 F"], Float[Tensor, "T"]]:
    """`sum_tokens` on the CPU. Its limits may be other numbers, but they select the same neurons.

    Numerics: float64 over spans of 128 tokens, added in order.
    """
    h, rows, count = _as_numpy(h_MF), rows_T.numpy(), np.int32(scan.active_count(h_MF.shape[1]))
    grad = h[:0] if grad_MF is None else _as_numpy(grad_MF)
    fixed = np.int32(0)
    if scan.active_threshold is not None:
        above = np.nextafter(np.float32(scan.active_threshold), np.float32(np.inf))
        fixed = max(above.view(np.int32), _SMALLEST)
    spans = [rows[first : first + _SPAN] for first in range(0, len(rows), _SPAN)]
    with ThreadPoolExecutor(min(torch.get_num_threads(), len(spans))) as threads:
        parts = list(threads.map(lambda span: _sum_span(h, grad, span, count, fixed), spans))
    total = parts[0][0]
    for part, _ in parts[1:]:
        np.maximum(total[2], part[2], out=part[2])
        total += part
        total[2] = part[2]
    limits = np.concatenate([bits for _, bits in parts]).view(np.float32)
    return torch.from_numpy(total), torch.from_numpy(limits)


def _as_numpy(values_MF: Tensor) -> NDArray[np.float32]:
    return values_MF.detach().float().contiguous().numpy()


def _count_from(bits: NDArray[np.int32], limit: np.int32) -> np.int32:
    count = np.int32(0)
    for neuron in range(len(bits)):
        count += np.int32(bits[neuron] >= limit)
    return count


def _find_limit(bits: NDArray[np.int32], count: np.int32, top: np.int32, guess: np.int32) -> np.int32:
    """A value that exactly `count` of the bits reach, or the largest one that more of them reach.

    Starts at `guess` and moves in growing steps until it brackets the value; then alternates interpolation (regula
    falsi) and bisection.
    """
    low, high = np.int32(0), top + np.int32(1)  # at least `count` bits reach low, fewer reach high
    reach_low, reach_high = np.int32(len(bits)), np.int32(0)
    limit, step, halfway = guess, _STEP, False
    while high - low > 1:
        if not low < limit < high:
            limit = low + (high - low) // np.int32(2)
        reached = _count_from(bits, limit)
        if reached == count:
            return limit
        if reached > count:
            low, reach_low = limit, reached
        else:
            high, reach_high = limit, reached
        if low == 0 or reach_high == 0:
            limit += step if reached > count else -step
            step *= np.int32(2)
        else:
            share = 0.5 if halfway else (reach_low - count + 0.5) / (reach_low - reach_high)
            limit, halfway = low + np.int32((high - low) * share), not halfway
    return low


def _sum_rows(
    h: NDArray[np.float32], grad: NDArray[np.float32], rows: NDArray[np.int64], count: np.int32, fixed: np.int32
) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Sums (5, F) over some tokens, and their limits as bits; `fixed` above 0 is the limit of all tokens."""
    width = h.shape[1]
    h_bits, bits = h.view(np.int32), np.empty(width, np.int32)
    sums, limits = np.zeros((5, width)), np.empty(len(rows), np.int32)
    limit = np.int32(0)
    for place in range(len(rows)):
        token, top = rows[place], np.int32(0)
        for neuron in range(width):
            bits[neuron] = h_bits[token, neuron] & _MAGNITUDE
            top = max(top, bits[neuron])
        limit = fixed if fixed > 0 else max(_find_limit(bits, count, top, limit), _SMALLEST)
        limits[place] = limit
        for neuron in range(width):
            magnitude = np.float64(abs(h[token, neuron]))
            sums[0, neuron] += magnitude
            sums[1, neuron] += magnitude * magnitude
            sums[2, neuron] = max(sums[2, neuron], magnitude)
            sums[3, neuron] += np.float64(bits[neuron] >= limit)
        if len(grad):
            for neuron in range(width):
                sums[4, neuron] += np.float64(abs(h[token, neuron] * grad[token, neuron]))
    return sums, limits


# nogil: threads run in parallel. Tests wrap functions for type checks, so that they are unwrapped first.
_compiled = njit(nogil=True, cache=True)
_count_from = _compiled(unwrap(_count_from))
_find_limit = _compiled(unwrap(_find_limit))
_sum_span = _compiled(unwrap(_sum_rows))


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
    """Sums of one batch during its pass through the model. Only `to_host` waits for the device."""

    def __init__(
        self, layers: int, mask_BT: Bool[Tensor, "B T"], slots_BT: Int[Tensor, "B T"], scan: ScanConfig
    ) -> None:
        """`mask_BT` marks the tokens that count; tokens with `slots_BT` >= 0 go to the reservoir. Both on the CPU."""
        self.scan = scan
        self.layers: list[LayerSums | None] = [None] * layers
        self.rows: dict[torch.device, Tensor] = {}
        self.real_T = mask_BT.flatten().nonzero()[:, 0]
        slots_T = slots_BT.flatten()[self.real_T]
        self.drawn_R = (slots_T >= 0).nonzero()[:, 0]
        self.slots_R = slots_T[self.drawn_R]

    def add_hidden(self, layer: int, h_BTF: Float[Tensor, "B T F"]) -> None:
        """Add one layer's activations: sums of the forward pass."""
        self._add_tokens(layer, h_BTF, None)

    def add_gradients(self, layer: int, record: FFNGradients) -> None:
        """Add one layer's activations and gradients: sums of both passes."""
        sums = self._add_tokens(layer, record.h_BTF, record.h_grad_BTF)
        for name, norms_BF in neuron_norms(record, self.scan.norm_product).items():
            sums.rows_8F[ROWS[f"grad_norm_{name}"]] = norms_BF.double().sum(0)
            sums.totals_B.add_(norms_BF.sum(1))

    def _add_tokens(self, layer: int, h_BTF: Tensor, grad_BTF: Tensor | None) -> LayerSums:
        sum_up = sum_tokens_compiled if h_BTF.device.type == "cpu" else sum_tokens
        h_MF, grad_MF = h_BTF.flatten(0, 1), None if grad_BTF is None else grad_BTF.flatten(0, 1)
        found_5F, limits_T = sum_up(h_MF, grad_MF, self._rows_on(h_BTF.device), self.scan)
        rows_8F = torch.zeros(len(ROWS), h_MF.shape[1], dtype=torch.float64, device=h_MF.device)
        rows_8F[: len(found_5F)] = found_5F
        drawn_R = self.drawn_R.to(h_MF.device, non_blocking=True)
        drawn_RF = h_MF[self._rows_on(h_BTF.device)[drawn_R]].float().abs() >= limits_T[drawn_R, None]
        self.layers[layer] = sums = LayerSums(
            rows_8F, pack_bits(drawn_RF), torch.zeros(len(h_BTF), device=h_BTF.device)
        )
        return sums

    def to_host(self, losses_B: Float[Tensor, "B"]) -> "HostBatch":
        """Copy the losses and all sums to the CPU, in one transfer per device."""
        parts = [part for part in self.layers if part is not None]
        assert len(parts) == len(self.layers), "a layer did not run"
        losses_B, *found = to_host([losses_B, *(tensor for part in parts for tensor in part)])
        rows_L8F, bits_LRf, totals_LB = (torch.stack(found[kind::3]) for kind in range(3))
        return HostBatch(losses_B, rows_L8F, bits_LRf, totals_LB.sum(0), self.slots_R)

    def _rows_on(self, device: torch.device) -> Tensor:
        if device not in self.rows:
            self.rows[device] = self.real_T.to(device, non_blocking=True)
        return self.rows[device]


@dataclass(frozen=True)
class HostBatch:
    """The sums of one batch on the CPU."""

    losses_B: Tensor
    rows_L8F: Tensor
    bits_LRf: Tensor
    totals_B: Tensor  # Σ‖∇‖ of each sample over all layers; zero after a forward-only pass
    slots_R: Tensor

    def add_to(self, sums: ScanSums, *, number: int, counters: dict[str, float], loss_scale: float = 1.0) -> None:
        """Add to running sums as batch `number`; gradient sums are divided by `loss_scale`."""
        for name, row in ROWS.items():
            values_LF, total = self.rows_L8F[:, row], sums.tensors[name]
            if name in BACKWARD:
                total += values_LF / loss_scale
            elif name == "max_abs":
                torch.maximum(total, values_LF, out=total)
            else:
                total += values_LF.to(total.dtype)
        sums.tensors["bits_LRf"][:, self.slots_R] = self.bits_LRf
        for name, count in counters.items():
            sums.counters[name] = sums.counters.get(name, 0) + count
        sums.done.add(number)
