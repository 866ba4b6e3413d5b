"""Text domains of a scan's samples, and what each adds to the Taylor sums."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stages.contracts.statistics import DomainStatistics
from stages.data.batches import TokenBatch
from stages.scan.config import ScanConfig
from stages.stores.sums import ScanSums, domain_sum

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
