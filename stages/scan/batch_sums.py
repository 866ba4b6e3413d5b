"""What one batch adds to the sums of a scan, computed where the layers are."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from instruments.ffn_probe import FFNGradients, neuron_norms
from instruments.parameter_scan.scan_pass import to_host
from stages.accumulators.sums import ScanSums, domain_sum
from stages.artifacts.statistics import DomainStatistics
from stages.scan.config import ScanConfig
from stages.scan.token_sums import NeuronRule, pack_bits, sum_tokens, sum_tokens_compiled
from stages.text.sequences import TokenBatch

MOST_DOMAINS = 32
OTHER = "other domains"


@dataclass(frozen=True)
class Domains:
    """The domains that are told apart, that of most tokens first; the last may stand for all smaller ones."""

    names: list[str]

    def number(self, batch: TokenBatch) -> Int[Tensor, "B"]:
        """Number of every sample's domain."""
        places = {name: place for place, name in enumerate(self.names)}
        return torch.tensor([places.get(name, len(self.names) - 1) for name in batch.domains])

    def digest(self, batches: Iterable[TokenBatch]) -> str:
        """Which sample is of which domain: parts of scans that differ in it must not be added up."""
        return sha256(repr([self.names, *(batch.domains for batch in batches)]).encode()).hexdigest()[:16]


def find_domains(batches: Iterable[TokenBatch], scan: ScanConfig) -> Domains | None:
    """The domains of all samples, where the settings ask for them."""
    if not scan.domains:
        return None
    tokens: Counter[str] = Counter()
    for batch in batches:
        tokens.update(dict.fromkeys(batch.domains, 0))
        for name, mask_T in zip(batch.domains, batch.attention_mask, strict=True):
            tokens[name] += int(mask_T.sum())
    names = [name for name, _ in tokens.most_common(MOST_DOMAINS)]
    return Domains([*names, OTHER] if len(tokens) > MOST_DOMAINS else names)


def sum_taylor_by_domain(
    h_BTF: Float[Tensor, "B T F"], grad_BTF: Float[Tensor, "B T F"], rows_B: Int[Tensor, "B"], rows: int
) -> Float[Tensor, "P F"]:
    """Σ|h·∂L/∂h| over the tokens of the samples that share a row.

    Padding adds nothing: its gradients are zero.

    Args:
        h_BTF: activations.
        grad_BTF: their gradients.
        rows_B: row of every sample, on the CPU.
        rows: P.
    Returns:
        Float64, on the activations' device.
    Numerics: fp32 products, float64 sums.
    """
    sums_PF = torch.zeros(rows, h_BTF.shape[2], dtype=torch.float64, device=h_BTF.device)
    for row, h_TF, grad_TF in zip(rows_B.tolist(), h_BTF, grad_BTF, strict=True):
        sums_PF[row] += (h_TF.float() * grad_TF.float()).abs_().sum(0, dtype=torch.float64)
    return sums_PF


def make_domain_statistics(sums: ScanSums, domains: Domains, batches: Sequence[TokenBatch]) -> DomainStatistics:
    """Take the sums by domain out of a scan's sums."""
    count = torch.cat([domains.number(batch) for batch in batches]).bincount(minlength=len(domains.names))
    taken = [sums.tensors.pop(domain_sum(number)) for number in range(len(domains.names))]
    return DomainStatistics(domains.names, count.tolist(), torch.stack(taken))


# Sums of the forward pass, then of the backward pass: one row each in a layer's buffer.
FORWARD = ("sum_abs", "sum_sq", "max_abs", "active_count")
BACKWARD = ("sum_taylor", "grad_norm_gate", "grad_norm_up", "grad_norm_down")
ROWS = {name: row for row, name in enumerate(FORWARD + BACKWARD)}


def sum_shapes(
    layers: int, width: int, reservoir: int, domains: int = 0
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and number formats of a scan's sums: float64, so that neither batch size nor length costs precision."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        name: ((layers, width), torch.int64 if name == "active_count" else torch.float64) for name in ROWS
    }
    shapes |= {domain_sum(number): ((layers, width), torch.float64) for number in range(domains)}
    # Token-major while scanning, so that a batch writes whole rows.
    shapes["bits_LRf"] = ((layers, reservoir, (width + 7) // 8), torch.uint8)
    return shapes


@dataclass
class LayerSums:
    """One layer's share of a batch."""

    rows_8F: Tensor  # float64, in the order of ROWS
    bits_Rf: Tensor  # reservoir rows in token order
    totals_B: Tensor  # every sample's Σ‖∇‖
    domains_PF: Tensor  # float64, Taylor sums of the batch's P domains


class BatchSums:
    """One batch while it passes the model. Nothing waits for the device before `to_host`."""

    def __init__(
        self,
        layers: int,
        mask_BT: Bool[Tensor, "B T"],
        slots_BT: Int[Tensor, "B T"],
        rule: NeuronRule,
        domains_B: Int[Tensor, "B"] | None = None,
    ) -> None:
        """Prepare on the CPU which tokens count (`mask_BT`) and which keep their bits (`slots_BT` >= 0).

        With `domains_B`, the number of every sample's text domain, Taylor scores are summed up by domain, too.
        """
        self.rule = rule
        by_number = torch.empty(0, dtype=torch.int64) if domains_B is None else domains_B
        self.domains_P, self.domain_rows_B = torch.unique(by_number, return_inverse=True)
        self.layers: list[LayerSums | None] = [None] * layers
        self.rows: dict[torch.device, Tensor] = {}
        self.real_T = mask_BT.flatten().nonzero()[:, 0]
        slots_T = slots_BT.flatten()[self.real_T]
        self.drawn_R = (slots_T >= 0).nonzero()[:, 0]
        self.slots_R = slots_T[self.drawn_R]

    def add_hidden(self, layer: int, h_BTF: Float[Tensor, "B T F"]) -> None:
        """Sums of the forward pass."""
        self._add_tokens(layer, h_BTF, None)

    def add_gradients(self, layer: int, record: FFNGradients) -> None:
        """Sums of both passes."""
        sums = self._add_tokens(layer, record.h_BTF, record.h_grad_BTF)
        for name, norms_BF in neuron_norms(record, self.rule.norm_product).items():
            sums.rows_8F[ROWS[f"grad_norm_{name}"]] = norms_BF.double().sum(0)
            sums.totals_B += norms_BF.sum(1)
        if len(self.domains_P):
            sums.domains_PF = sum_taylor_by_domain(
                record.h_BTF, record.h_grad_BTF, self.domain_rows_B, len(self.domains_P)
            )

    def _add_tokens(self, layer: int, h_BTF: Tensor, grad_BTF: Tensor | None) -> LayerSums:
        sum_up = sum_tokens_compiled if h_BTF.device.type == "cpu" else sum_tokens
        h_MF, grad_MF = h_BTF.flatten(0, 1), None if grad_BTF is None else grad_BTF.flatten(0, 1)
        found_5F, limits_T = sum_up(h_MF, grad_MF, self._rows_on(h_BTF.device), self.rule)
        rows_8F = torch.zeros(len(ROWS), h_MF.shape[1], dtype=torch.float64, device=h_MF.device)
        rows_8F[: len(found_5F)] = found_5F
        drawn_R = self.drawn_R.to(h_MF.device, non_blocking=True)
        drawn_RF = h_MF[self._rows_on(h_BTF.device)[drawn_R]].float().abs() >= limits_T[drawn_R, None]
        self.layers[layer] = sums = LayerSums(
            rows_8F, pack_bits(drawn_RF), torch.zeros(len(h_BTF), device=h_BTF.device), rows_8F[:0]
        )
        return sums

    def to_host(self, losses_B: Float[Tensor, "B"]) -> "HostBatch":
        """Everything on the CPU, with the batch's losses, by one transfer for each device that holds layers."""
        parts = [part for part in self.layers if part is not None]
        assert len(parts) == len(self.layers), "a layer did not run"
        kinds = ("rows_8F", "bits_Rf", "totals_B", "domains_PF")
        groups = [[getattr(part, kind) for part in parts] for kind in kinds]
        found = iter(to_host([losses_B, *(tensor for group in groups for tensor in group)]))
        losses_B = next(found)
        rows_L8F, bits_LRf, totals_LB, domains_LPF = (torch.stack([next(found) for _ in parts]) for _ in groups)
        return HostBatch(
            losses_B, rows_L8F, bits_LRf, totals_LB.sum(0), self.slots_R, domains_LPF, self.domains_P.tolist()
        )

    def _rows_on(self, device: torch.device) -> Tensor:
        if device not in self.rows:
            self.rows[device] = self.real_T.to(device, non_blocking=True)
        return self.rows[device]


@dataclass(frozen=True)
class HostBatch:
    """One batch on the CPU."""

    losses_B: Tensor
    rows_L8F: Tensor
    bits_LRf: Tensor
    totals_B: Tensor  # every sample's Σ‖∇‖ over all layers; zero after a forward-only pass
    slots_R: Tensor
    domains_LPF: Tensor
    domains: list[int]  # their numbers

    def add_to(self, sums: ScanSums, *, number: int, counters: dict[str, float], loss_scale: float = 1.0) -> None:
        """Add the batch to running sums, as batch `number`; gradients are divided by the scale their loss had."""
        for name, row in ROWS.items():
            values_LF, total = self.rows_L8F[:, row], sums.tensors[name]
            if name in BACKWARD:
                total += values_LF / loss_scale
            elif name == "max_abs":
                torch.maximum(total, values_LF, out=total)
            else:
                total += values_LF.to(total.dtype)
        for domain, values_LF in zip(self.domains, self.domains_LPF.unbind(1), strict=True):
            sums.tensors[domain_sum(domain)] += values_LF / loss_scale
        sums.tensors["bits_LRf"][:, self.slots_R] = self.bits_LRf
        for name, count in counters.items():
            sums.counters[name] = sums.counters.get(name, 0) + count
        sums.done.add(number)
