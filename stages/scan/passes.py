"""The scan itself: one teacher-forced pass per batch, forward only or with the backward pass."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from models.capture.ffn_probe import FFNGradients, probe_gradients, probe_hidden
from models.errors import CheckpointError, NumericsError
from models.ffn import GatedFFN
from stages.calibration.forward import forward_losses
from stages.data.batches import TokenBatch
from stages.scan.reservoir import slots_of_batch
from stages.scan.unit_sums import UnitSums


@dataclass
class Position:
    """How far a scan has come; saved with the sums."""

    next_batch: int = 0
    tokens: int = 0
    samples: int = 0
    loss_sum: float = 0.0

    @classmethod
    def resume(cls, counters: Mapping[str, int | float]) -> "Position":
        """The position saved as `asdict`."""
        return cls(int(counters["next_batch"]), int(counters["tokens"]), int(counters["samples"]), counters["loss_sum"])


def scan_batches(
    model: nn.Module,
    mlps: Sequence[GatedFFN],
    batches: Sequence[TokenBatch],
    sums: UnitSums,
    position: Position,
    slots_T: Tensor,
    *,
    gradients: bool,
    after_batch: Callable[[Position, int], None],
) -> None:
    """Add every batch from `position` on to `sums`.

    Args:
        model: causal language model, all weights frozen.
        mlps: its gated FFNs, in layer order.
        batches: token batches of the whole scan.
        sums: updated in place.
        position: updated in place.
        slots_T: reservoir slot of every token of the stream, -1 for none.
        gradients: run the backward pass.
        after_batch: called with the position and the tokens of the batch just added.
    Raises:
        CheckpointError: weights are not finite.
        NumericsError: a sample's loss or gradients are not finite, or all its gradients are zero.
    """
    for batch in batches[position.next_batch :]:
        mask_BT = batch.attention_mask.bool()
        slots_BT = slots_of_batch(slots_T, position.tokens, mask_BT)
        run = scan_with_gradients if gradients else scan_forward
        losses = run(model, mlps, batch, sums, slots_BT)
        tokens = int(mask_BT.sum())
        position.next_batch += 1
        position.tokens += tokens
        position.samples += len(batch.names)
        position.loss_sum += float(losses.double().sum())
        after_batch(position, tokens)


def scan_with_gradients(
    model: nn.Module, mlps: Sequence[GatedFFN], batch: TokenBatch, sums: UnitSums, slots_BT: Tensor
) -> Float[Tensor, "B"]:
    """One forward and backward pass; every sample's loss is its own mean, so a batch of B equals B batches of one."""
    mask_BT = batch.attention_mask.bool()
    totals_B = torch.zeros(len(batch.names))

    def add(layer: int, record: FFNGradients) -> None:
        sums.add_hidden(layer, record.h_BTF, mask_BT, slots_BT)
        totals_B.add_(sums.add_gradients(layer, record, mask_BT))

    with probe_gradients(mlps, add), torch.enable_grad():
        losses_B = forward_losses(model, batch)
        check_losses(losses_B, batch, model)
        losses_B.sum().backward()  # type: ignore[no-untyped-call]
    check_gradients(totals_B, batch)
    return losses_B.detach().cpu()


@torch.no_grad()
def scan_forward(
    model: nn.Module, mlps: Sequence[GatedFFN], batch: TokenBatch, sums: UnitSums, slots_BT: Tensor
) -> Float[Tensor, "B"]:
    """One forward pass: activation statistics only."""
    mask_BT = batch.attention_mask.bool()
    with probe_hidden(mlps, lambda layer, h_BTF: sums.add_hidden(layer, h_BTF, mask_BT, slots_BT)):
        losses_B = forward_losses(model, batch)
    check_losses(losses_B, batch, model)
    return losses_B.cpu()


def check_losses(losses_B: Float[Tensor, "B"], batch: TokenBatch, model: nn.Module) -> None:
    """Refuse losses that are not finite, naming the weights that are to blame, or else the samples."""
    bad_B = ~losses_B.detach().isfinite()
    if bad_B.any():
        check_weights(model)
    _refuse(
        bad_B,
        batch,
        "the loss is not finite",
        "look for a sample without a supervised next token, or scan in another format: model.dtype=float32",
    )


def check_weights(model: nn.Module) -> None:
    """Refuse weights that are not finite, naming the tensors."""
    bad = [name for name, weight in model.named_parameters() if not weight.isfinite().all()]
    if bad:
        raise CheckpointError(
            f"{len(bad)} tensors hold weights that are not finite",
            where=", ".join(bad[:3]) + (" ..." if len(bad) > 3 else ""),
            do="download or copy the checkpoint again, or model.dtype=float32 if its numbers are too large for float16",
        )


def check_gradients(totals_B: Float[Tensor, "B"], batch: TokenBatch) -> None:
    """Refuse samples whose gradients are all zero or not finite, naming them."""
    _refuse(
        ~totals_B.isfinite(),
        batch,
        "the gradients are not finite",
        "model.dtype=float32; if it is, the checkpoint's weights are scaled beyond its range",
    )
    _refuse(
        totals_B == 0,
        batch,
        "all gradients are zero",
        "check that the checkpoint's FFN weights are not all zero, and that float16 does not underflow: "
        "model.dtype=float32",
    )


def _refuse(bad_B: Bool[Tensor, "B"], batch: TokenBatch, what: str, do: str) -> None:
    names = [name for name, bad in zip(batch.names, bad_B.tolist(), strict=True) if bad]
    if names:
        raise NumericsError(f"{what} in {len(names)} of {len(batch.names)} samples", where=", ".join(names), do=do)
