"""The sums of a scan: how strongly and how often each neuron fires, its Taylor score and gradients."""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from instruments.device import is_launch_bound
from instruments.errors import CheckpointError
from instruments.ffn_probe import FFNGradients, neuron_norms
from instruments.gradients import join
from instruments.tensors import to_host
from models.device import send
from stages.accumulators.sums import ScanSums
from stages.scan.config import ScanConfig
from stages.text.batches import TokenBatch

# Tokens per step of `sum_tokens`.
_CHUNK = 4096
# Activations, of so many layers as fit, that a GPU's host sums up with the operators of one layer.
_GROUP_VALUES = 2**26


def sum_tokens(
    h_LMF: Float[Tensor, "L M F"], grad_LMF: Float[Tensor, "L M F"] | None, rows_T: Int[Tensor, "T"], scan: ScanConfig
) -> tuple[Float[Tensor, "L 5 F"], Float[Tensor, "L T"]]:
    """Σ|h|, Σh², max|h|, the number of tokens for which a neuron is active, and Σ|h·∂L/∂h|.

    `rows_T` selects the tokens that count from the M rows (padding included); without gradients the last sum is 0.

    Returns:
        Float64 sums on the same device, and the activity limit of every token (see `activity_limits`).

    Numerics: fp32 within 4096 tokens, float64 beyond.
    """
    sums_5LF = torch.zeros(5, len(h_LMF), h_LMF.shape[2], dtype=torch.float64, device=h_LMF.device)
    limits = []
    for rows in torch.split(rows_T, _CHUNK):
        magnitude_LTF = h_LMF[:, rows].float().abs()
        limit_LT1 = activity_limits(magnitude_LTF, scan)
        sums_5LF[0] += magnitude_LTF.sum(1)
        sums_5LF[1] += magnitude_LTF.square().sum(1)
        sums_5LF[2] = torch.maximum(sums_5LF[2], magnitude_LTF.amax(1))
        sums_5LF[3] += (magnitude_LTF >= limit_LT1).sum(1)
        if grad_LMF is not None:
            sums_5LF[4] += magnitude_LTF.mul_(grad_LMF[:, rows]).abs_().sum(1)
        limits.append(limit_LT1[..., 0])
    return sums_5LF.transpose(0, 1), torch.cat(limits, dim=1)


def activity_limits(magnitude_LTF: Float[Tensor, "L T F"], scan: ScanConfig) -> Float[Tensor, "L T 1"]:
    """For every token, the smallest |h| that counts as active: ties included, zeros never."""
    smallest = torch.finfo(torch.float32).tiny
    count = scan.active_count(magnitude_LTF.shape[-1])
    return magnitude_LTF.topk(count, sorted=False).values.amin(-1, keepdim=True).clamp_min(smallest)


def pack_bits(active_F: Bool[Tensor, "*b F"]) -> UInt8[Tensor, "*b f"]:
    """Pack booleans into bits, (..., ceil(F/8)) uint8, most significant bit first as in numpy.packbits."""
    padded = torch.nn.functional.pad(active_F.to(torch.uint8), (0, -active_F.shape[-1] % 8))
    places = torch.arange(7, -1, -1, dtype=torch.uint8, device=active_F.device)
    packed: Tensor = (padded.view(*padded.shape[:-1], padded.shape[-1] // 8, 8) << places).sum(-1, dtype=torch.uint8)
    return packed


# Tokens per partial sum. Fixed, so that results do not depend on the number of threads.
_SPAN = 128


def sum_tokens_numpy(
    h_LMF: Float[Tensor, "L M F"], grad_LMF: Float[Tensor, "L M F"] | None, rows_T: Int[Tensor, "T"], scan: ScanConfig
) -> tuple[Float[Tensor, "L 5 F"], Float[Tensor, "L T"]]:
    """`sum_tokens` on the CPU, where numpy selects the largest values faster than torch.

    Numerics: float64 over spans of 128 tokens, added in order.
    """
    gradients = [None] * len(h_LMF) if grad_LMF is None else grad_LMF
    found = [_sum_layer(h_MF, grad_MF, rows_T, scan) for h_MF, grad_MF in zip(h_LMF, gradients, strict=True)]
    sums_5F, limits_T = zip(*found, strict=True)
    return torch.stack(sums_5F), torch.stack(limits_T)


def _sum_layer(
    h_MF: Tensor, grad_MF: Tensor | None, rows_T: Tensor, scan: ScanConfig
) -> tuple[Float[Tensor, "5 F"], Float[Tensor, "T"]]:
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
    lowest = h_TF.shape[1] - scan.active_count(h_TF.shape[1])
    limits = np.maximum(np.partition(magnitude_TF, lowest, axis=1)[:, lowest], np.finfo(np.float32).tiny)
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
    """The sums of one layer over one batch; of several layers, with one more dimension."""

    rows_8F: Tensor  # float64, in the order of ROWS
    bits_Rf: Tensor  # reservoir rows in token order
    totals_B: Tensor  # Σ‖∇‖ of each sample


class BatchSums:
    """Sums of one batch during its pass through the model; nothing in it waits for the device."""

    def __init__(
        self, layers: int, width: int, mask_BT: Bool[Tensor, "B T"], slots_BT: Int[Tensor, "B T"], scan: ScanConfig
    ) -> None:
        """`width`: F; zero neurons fill the sums of narrow layers.

        `mask_BT` marks the tokens that count; tokens with `slots_BT` >= 0 go to the reservoir. Both on the CPU.
        """
        self.scan, self.width = scan, width
        self.layers: list[LayerSums | None] = [None] * layers
        self.real_T = torch.from_numpy(np.flatnonzero(mask_BT.numpy()))
        slots_T = slots_BT.flatten()[self.real_T]
        self.drawn_R = torch.from_numpy(np.flatnonzero(slots_T.numpy() >= 0))
        self.slots_R = slots_T[self.drawn_R]
        self._rows: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._waiting: dict[int, FFNGradients] = {}  # of layers on one device

    def add_hidden(self, layer: int, h_BTF: Float[Tensor, "B T F"]) -> None:
        """Add one layer's activations: sums of the forward pass."""
        self._add_tokens([layer], self._widened(h_BTF)[None], None)

    def _widened(self, x_BTF: Tensor) -> Tensor:
        missing = self.width - x_BTF.shape[-1]
        return pad(x_BTF, (0, missing)) if missing else x_BTF

    def add_gradients(self, layer: int, record: FFNGradients) -> None:
        """Add one layer's activations and gradients: sums of both passes. On a GPU some layers wait for each other."""
        wide = {name: self._widened(tensor) for name, tensor in vars(record).items() if name.endswith("_BTF")}
        record = replace(record, **wide)
        device = record.h_BTF.device
        if self._waiting and next(iter(self._waiting.values())).h_BTF.device != device:
            self._add_waiting()
        self._waiting[layer] = record
        if not is_launch_bound(device) or (len(self._waiting) + 1) * record.h_BTF.numel() > _GROUP_VALUES:
            self._add_waiting()

    @torch.no_grad()
    def _add_waiting(self) -> None:
        layers, records = [*self._waiting], [*map(vars, self._waiting.values())]
        self._waiting = {}
        # Their samples as those of one batch.
        record = FFNGradients(**{name: join([one[name] for one in records]) for name in records[0]})
        count = len(records[0]["h_BTF"])
        h_LBTF, grad_LBTF = (one.reshape(-1, count, *one.shape[1:]) for one in (record.h_BTF, record.h_grad_BTF))
        found = self._add_tokens(layers, h_LBTF, grad_LBTF)
        for name, norms_BF in neuron_norms(record, "auto").items():
            norms_LBF = norms_BF.view(len(layers), count, -1)
            found.rows_8F[:, ROWS[f"grad_norm_{name}"]] = norms_LBF.double().sum(1)
            found.totals_B.add_(norms_LBF.sum(2))

    def join(self, losses_B: Float[Tensor, "B"], without: Collection[int] = ()) -> "ScannedBatch":
        """The sums of all layers, on the device of the losses; zeros of layers `without` an FFN."""
        if self._waiting:
            self._add_waiting()
        if idle := [str(layer) for layer, part in enumerate(self.layers) if part is None and layer not in without]:
            what, do = "the model does not run these layers on text alone", "choose a model whose layers all read text"
            raise CheckpointError(what, where=f"layer {', '.join(idle)}", do=do)
        zeros = LayerSums(*map(torch.zeros_like, next(part for part in self.layers if part)))
        parts = [part or zeros for part in self.layers]
        rows_L8F, bits_LRf, totals_LB = (
            torch.stack([tensor.to(losses_B.device) for tensor in kind]) for kind in zip(*parts, strict=True)
        )
        return ScannedBatch(losses_B, rows_L8F, bits_LRf, totals_LB.sum(0), self.slots_R)

    def _add_tokens(self, layers: Sequence[int], h_LBTF: Tensor, grad_LBTF: Tensor | None) -> LayerSums:
        """The sums of some layers, one after the other in a first dimension; the views of each are kept."""
        device = h_LBTF.device
        sum_up = sum_tokens if is_launch_bound(device) else sum_tokens_numpy
        h_LMF, grad_LMF = h_LBTF.flatten(1, 2), None if grad_LBTF is None else grad_LBTF.flatten(1, 2)
        rows_T, drawn_R = self._rows_on(device)
        found_L5F, limits_LT = sum_up(h_LMF, grad_LMF, rows_T, self.scan)
        rows_L8F = torch.zeros(len(layers), len(ROWS), h_LMF.shape[2], dtype=torch.float64, device=device)
        rows_L8F[:, : found_L5F.shape[1]] = found_L5F
        drawn_LRF = h_LMF[:, rows_T[drawn_R]].float().abs() >= limits_LT[:, drawn_R, None]
        found = LayerSums(rows_L8F, pack_bits(drawn_LRF), torch.zeros(h_LBTF.shape[:2], device=device))
        for layer, *tensors in zip(layers, *found, strict=True):
            self.layers[layer] = LayerSums(*tensors)
        return found

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
        # Its sums are not kept, nor a view of them: a GPU would hold those of all batches until `drain`.
        self._waiting.append((number, batch, checked, replace(found, rows_L8F=largest_LF.new_empty(0))))

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
