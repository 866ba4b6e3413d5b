"""The record of a finished pass: its measurements on the CPU, by parameter, block and token."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from instruments.errors import NumericsError, some
from instruments.parameter_scan.call import CallFacts
from instruments.parameter_scan.parameters import WatchedParameter
from instruments.parameter_scan.scan_pass import ScanPass, Squares
from instruments.parameter_scan.targets import ScannedSequence, ScanRecord


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors to the CPU in their own number formats, with one transfer per device."""
    places: dict[torch.device, list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        places[tensor.device].append(place)
    found = list(tensors)
    for group in places.values():
        moved = torch.cat([tensors[place].detach().contiguous().view(-1).view(torch.uint8) for place in group]).cpu()
        sizes = [tensors[place].numel() * tensors[place].element_size() for place in group]
        for place, data in zip(group, moved.split(sizes), strict=True):
            # Cloned for the alignment that the number format needs.
            found[place] = data.clone().view(tensors[place].dtype).view(tensors[place].shape)
    return found


def join_blocks(
    pieces: Mapping[int, Tensor], counts: Sequence[int], samples: int
) -> tuple[Float[Tensor, "B n"], Float[Tensor, "B P"]]:
    """Concatenate the blocks of P parameters, `counts` each, NaN if not measured; and their sum by parameter."""
    blocks = (pieces.get(column, torch.full((samples, count), torch.nan)) for column, count in enumerate(counts))
    joined_Bn = torch.cat([*blocks], dim=1)
    owner_n = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return joined_Bn, joined_Bn.new_zeros(samples, len(counts)).index_add_(1, owner_n, joined_Bn)


def to_record(
    scan_pass: ScanPass, squares: Squares, parameters: Sequence[WatchedParameter], *, gradients: bool
) -> tuple[ScanRecord | None, list[str]]:
    """The record of a pass, and the names of samples left out because they have no supervised token.

    A sample whose only label is its first has none if the model shifts labels: its gradient is zero or not finite.
    All transfers happen here. Raises NumericsError: `gradients`, and a sample's are missing, all zero or not finite.
    """
    squares, mask_BT, counts_B = _fetch(scan_pass.facts, squares)
    kept = torch.ones(len(mask_BT), dtype=torch.bool)
    norms = _by_parameter_and_block(parameters, squares, len(kept))
    measured = sorted(squares.out_gradient)
    found_BP = norms[1][:, measured]
    if gradients and counts_B:
        trained = found_BP.isfinite().all(1) & found_BP.any(1)
        supervised_B = counts_B["supervised_B"]
        kept = (supervised_B > 0) | ((counts_B.get("labelled_B", supervised_B) > 0) & trained)
    indices = kept.nonzero().flatten().tolist()
    skipped = [name for name, keep in zip(scan_pass.names, kept.tolist(), strict=True) if not keep]
    if not indices:
        return None, skipped
    counts = mask_BT.sum(1).tolist()
    sequences = [ScannedSequence(scan_pass.names[index], counts[index], scan_pass.source) for index in indices]
    if gradients:
        weights = [parameters[column].name for column in measured]
        _check(found_BP[kept], weights, [sequence.name for sequence in sequences])
    tokens = [
        _by_token(pieces, mask_BT, indices, len(parameters)) if scan_pass.per_token else None
        for pieces in (squares.token_activation, squares.token_gradient)
    ]
    activation, gradient, in_activation, in_gradient, out_gradient = (values_BN[kept] for values_BN in norms)
    return ScanRecord(sequences, activation, gradient, in_activation, in_gradient, out_gradient, *tokens), skipped


def _by_parameter_and_block(
    parameters: Sequence[WatchedParameter], squares: Squares, samples: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The five tensors of a record: activation and gradient in total, both by input block, gradient by output block."""
    inputs, outputs = ([getattr(one, side) for one in parameters] for side in ("in_blocks", "out_blocks"))
    # An embedding has no input block, but one activation: that of the rows looked up.
    _, activation = join_blocks(squares.activation, [max(1, count) for count in inputs], samples)
    linear = {column: found for column, found in squares.activation.items() if inputs[column]}
    in_activation, _ = join_blocks(linear, inputs, samples)
    in_gradient, _ = join_blocks(squares.in_gradient, inputs, samples)
    out_gradient, gradient = join_blocks(squares.out_gradient, outputs, samples)
    return activation.sqrt(), gradient.sqrt(), in_activation.sqrt(), in_gradient.sqrt(), out_gradient.sqrt()


def _by_token(pieces: Mapping[int, Tensor], mask_BT: Tensor, indices: Sequence[int], parameters: int) -> list[Tensor]:
    """Norms of each of these samples, (tokens, P)."""
    table_BTP = torch.full((*mask_BT.shape, parameters), torch.nan)
    for column, squares_BS in pieces.items():
        # A module called with only the last positions fills those.
        table_BTP[:, -squares_BS.shape[1] :, column] = squares_BS
    return [table_BTP[index][mask_BT[index]].sqrt_() for index in indices]


def _fetch(facts: CallFacts, squares: Squares) -> tuple[Squares, Tensor, dict[str, Tensor]]:
    """Squares, mask (B, T) and numbers of labels (B,), if known, on the CPU."""
    groups = vars(squares).values()
    tensors = [tensor for group in groups for tensor in group.values()]
    # The call's facts are transferred together with the first device's tensors.
    device = tensors[0].device if tensors else torch.device("cpu")
    counted = {name: getattr(facts, name) for name in ("mask_BT", "supervised_B", "labelled_B")}
    known = {name: fact.to(device, torch.float32) for name, fact in counted.items() if fact is not None}
    fetched = iter(to_host([*tensors, *known.values()]))
    squares = Squares(*(dict(zip(group, fetched, strict=False)) for group in groups))
    call = dict(zip(known, fetched, strict=True))
    mask_BT = call.pop("mask_BT") > 0 if "mask_BT" in call else torch.ones(facts.samples, facts.length).bool()
    return squares, mask_BT, call


def _check(found_BP: Tensor, measured: Sequence[str], names: Sequence[str]) -> None:
    """Raise NumericsError if a sample's gradients are missing, all zero or not finite; `measured`: names of weights."""
    # List the last weight first: the backward pass starts there and propagates non-finite values.
    weights = [name for name, fine in zip(measured, found_BP.isfinite().all(0), strict=True) if not fine][::-1]
    for what, bad, do in (
        (
            "no gradient reached a watched parameter",
            [] if measured else names,
            "call backward on a loss of what the scanned model returned",
        ),
        (
            "the gradient is not finite",
            [name for name, row in zip(names, found_BP, strict=True) if not row.isfinite().all()],
            "look for a sample without a supervised next token, or scan in another format: float32 or bfloat16",
        ),
        (
            "all gradients are zero",
            [name for name, row in zip(names, found_BP, strict=True) if not row.any()],
            "see that the loss uses these samples (labels not all masked; the first label of a sample is shifted "
            "away), and that gradients do not vanish in the number format: float32, or a scaled loss",
        ),
    ):
        if bad:
            where = some(bad) + (f"; of {some(weights, 3, ', ')}" if weights else "")
            raise NumericsError(f"{what} in {len(bad)} of {len(names)} samples", where=where, do=do)
