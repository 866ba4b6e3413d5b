"""Bring the measured squares to the CPU, one transfer a device, and make a record of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.capture.parameters.scan_pass import Buffers, ScanPass
from models.capture.records import ScannedSequence, ScanRecord
from models.errors import NumericsError


@dataclass(frozen=True)
class Measured:
    """A finished pass."""

    scan_pass: ScanPass
    buffers: Buffers


def to_record(measured: Measured, *, gradients: bool) -> tuple[ScanRecord | None, list[str]]:
    """The record of a pass, and the names of samples left out because no token of theirs is supervised.

    Args:
        measured: a finished pass; all transfers happen here.
        gradients: whether a backward pass belongs to it.
    Raises:
        NumericsError: the gradient of a sample is zero everywhere, or not finite.
    """
    scan_pass = measured.scan_pass
    squares_BW, tokens_BTP, mask_BT, supervised_B = _fetch(measured)
    kept = torch.ones(scan_pass.facts.samples, dtype=torch.bool)
    if gradients and supervised_B is not None:
        kept = supervised_B > 0
    indices = kept.nonzero().flatten().tolist()
    skipped = [name for name, keep in zip(scan_pass.names, kept.tolist(), strict=True) if not keep]
    if not indices:
        return None, skipped
    activation, gradient, in_activation, in_gradient, out_gradient = scan_pass.layout.split(squares_BW[kept].sqrt_())
    sequences = [
        ScannedSequence(scan_pass.names[index], int(mask_BT[index].sum()), scan_pass.source) for index in indices
    ]
    if gradients:
        _check(gradient, sorted(measured.buffers.with_gradient), [sequence.name for sequence in sequences])
    token_activation, token_gradient = None, None
    if tokens_BTP is not None:
        by_token = [tokens_BTP[index][mask_BT[index]].sqrt_().chunk(2, dim=1) for index in indices]
        token_activation, token_gradient = [pair[0] for pair in by_token], [pair[1] for pair in by_token]
    record = ScanRecord(
        sequences, activation, gradient, in_activation, in_gradient, out_gradient, token_activation, token_gradient
    )
    return record, skipped


def _fetch(measured: Measured) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Everything on the CPU: sums (B, W), tokens (B, T, 2P) or None, mask (B, T), supervised (B,) or None."""
    facts, buffers = measured.scan_pass.facts, measured.buffers
    mask_BT = torch.ones(facts.samples, facts.length, dtype=torch.bool) if facts.mask_BT is None else facts.mask_BT
    sums: list[Tensor] = []
    tokens: list[Tensor] = []
    extras = [mask_BT.float()]
    if facts.supervised_B is not None:
        extras.append(facts.supervised_B)
    for device, sums_BW in buffers.sums.items():
        parts = [sums_BW, *([buffers.tokens[device]] if device in buffers.tokens else [])]
        # The facts of the call ride along with the first device.
        brought = _bring([*parts, *(extra.to(device) for extra in extras)] if not sums else parts)
        sums.append(brought[0])
        if device in buffers.tokens:
            tokens.append(brought[1])
        if len(sums) == 1:
            extras = brought[len(parts) :]
    supervised_B = extras[1] if facts.supervised_B is not None else None
    return _merge(sums), _merge(tokens) if tokens else None, extras[0] > 0, supervised_B


def _bring(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies on the CPU, moved in one piece."""
    flat = torch.cat([tensor.flatten() for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _merge(parts: Sequence[Tensor]) -> Tensor:
    """What several devices measured, each its own parameters and NaN elsewhere."""
    merged, *others = parts
    for other in others:
        merged = torch.where(merged.isnan(), other, merged)
    return merged


def _check(gradient_BP: Tensor, measured: Sequence[int], names: Sequence[str]) -> None:
    found_BP = gradient_BP[:, measured]
    if not measured:
        raise NumericsError(
            f"no gradient reached a watched parameter in {len(names)} of {len(names)} samples",
            where=_some(names),
            do="call backward on a loss of what the scanned model returned",
        )
    bad = [name for name, row in zip(names, found_BP, strict=True) if not row.isfinite().all()]
    if bad:
        raise NumericsError(
            f"the gradient is not finite in {len(bad)} of {len(names)} samples",
            where=_some(bad),
            do="look for a sample without a supervised next token, or scan in another format: float32 or bfloat16",
        )
    zero = [name for name, row in zip(names, found_BP, strict=True) if not row.any()]
    if zero:
        raise NumericsError(
            f"all gradients are zero in {len(zero)} of {len(names)} samples",
            where=_some(zero),
            do="see that the loss uses these samples (labels not all masked; the first label of a sample is shifted "
            "away), and that gradients do not vanish in the number format: float32, or a scaled loss",
        )


def _some(names: Sequence[str]) -> str:
    shown = "; ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown}; and {len(names) - 5} more"
