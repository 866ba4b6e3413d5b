"""Bring the measured squares to the CPU, one transfer a device, and make a record of them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from instruments.errors import NumericsError
from instruments.parameter_scan.scan_pass import Layout, ScanPass, Squares
from instruments.parameter_scan.targets import ScannedSequence, ScanRecord


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors on the CPU, in their own number formats; those of one device travel in one transfer."""
    places: dict[torch.device, list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        places[tensor.device].append(place)
    found = list(tensors)
    for group in places.values():
        moved = torch.cat([tensors[place].detach().contiguous().view(-1).view(torch.uint8) for place in group]).cpu()
        sizes = [tensors[place].numel() * tensors[place].element_size() for place in group]
        for place, data in zip(group, moved.split(sizes), strict=True):
            # Copied, so that it begins where its number format may begin.
            found[place] = data.clone().view(tensors[place].dtype).view(tensors[place].shape)
    return found


@dataclass(frozen=True)
class Measured:
    """A finished pass."""

    scan_pass: ScanPass
    squares: Squares


def to_record(measured: Measured, *, gradients: bool) -> tuple[ScanRecord | None, list[str]]:
    """The record of a pass, and the names of samples left out because no token of theirs is supervised.

    Args:
        measured: a finished pass; all transfers happen here.
        gradients: whether a backward pass belongs to it.
    Raises:
        NumericsError: the gradient of a sample is zero everywhere, or not finite.
    """
    scan_pass = measured.scan_pass
    squares, mask_BT, supervised_B = _fetch(measured)
    kept = torch.ones(len(mask_BT), dtype=torch.bool)
    if gradients and supervised_B is not None:
        kept = supervised_B > 0
    indices = kept.nonzero().flatten().tolist()
    skipped = [name for name, keep in zip(scan_pass.names, kept.tolist(), strict=True) if not keep]
    if not indices:
        return None, skipped
    norms = [values_BN[kept] for values_BN in _by_parameter_and_block(scan_pass.layout, squares, len(kept))]
    counts = mask_BT.sum(1).tolist()
    sequences = [ScannedSequence(scan_pass.names[index], counts[index], scan_pass.source) for index in indices]
    if gradients:
        _check(norms[1], sorted(squares.out_gradient), [sequence.name for sequence in sequences])
    tokens = _by_token(scan_pass, squares, mask_BT, indices) if scan_pass.per_token else (None, None)
    return ScanRecord(sequences, norms[0], norms[1], norms[2], norms[3], norms[4], *tokens), skipped


def _by_parameter_and_block(layout: Layout, squares: Squares, samples: int) -> list[Tensor]:
    """The five tensors of a record: totals of activation and gradient, blocks of both, output blocks."""
    read = layout.join(squares.activation, layout.read, samples)
    in_gradient = layout.join(squares.in_gradient, layout.inputs, samples)
    out_gradient = layout.join(squares.out_gradient, layout.outputs, samples)
    linear = torch.tensor([parameter.kind == "linear" for parameter in layout.parameters])
    in_activation = read[:, linear[layout.read]]
    totals = layout.totals(read, layout.read), layout.totals(out_gradient, layout.outputs)
    return [values.sqrt() for values in (*totals, in_activation, in_gradient, out_gradient)]


def _by_token(
    scan_pass: ScanPass, squares: Squares, mask_BT: Tensor, indices: Sequence[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """For every sample (its tokens, P): norms of activations and of what each position contributes."""
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for group, pieces in zip(found, (squares.token_activation, squares.token_gradient), strict=True):
        table_BTP = torch.full((*mask_BT.shape, len(scan_pass.layout.parameters)), torch.nan)
        for index, squares_BS in pieces.items():
            # A module that saw the last positions only fills those.
            table_BTP[:, -squares_BS.shape[1] :, index] = squares_BS
        group += [table_BTP[index][mask_BT[index]].sqrt_() for index in indices]
    return found


def _fetch(measured: Measured) -> tuple[Squares, Tensor, Tensor | None]:
    """Everything on the CPU: squares, mask (B, T) and supervised tokens (B,), where known."""
    facts, squares, call = measured.scan_pass.facts, Squares(), dict[str, Tensor]()
    groups = zip(squares.groups(), measured.squares.groups(), strict=True)
    wanted: list[tuple[dict[Any, Tensor], Any, Tensor]] = [
        (target, index, tensor) for target, group in groups for index, tensor in group.items()
    ]
    # What is known of the call rides along with the first device.
    device = wanted[0][2].device if wanted else torch.device("cpu")
    for name, known in (("mask", facts.mask_BT), ("supervised", facts.supervised_B)):
        if known is not None:
            wanted.append((call, name, known.to(device, torch.float32)))
    for (target, key, _), tensor in zip(wanted, to_host([tensor for *_, tensor in wanted]), strict=True):
        target[key] = tensor
    mask_BT = call["mask"] > 0 if "mask" in call else torch.ones(facts.samples, facts.length, dtype=torch.bool)
    return squares, mask_BT, call.get("supervised")


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
