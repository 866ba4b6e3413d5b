"""What must not pass silently: numbers that are not finite, and gradients that are all zero."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from models.errors import CheckpointError, NumericsError
from stages.data.batches import TokenBatch
from stages.metrics.loss import supervised_tokens


def check_losses(losses_B: Float[Tensor, "B"], batch: TokenBatch, model: nn.Module) -> None:
    """Refuse losses that are not finite, naming the weights that are to blame, or else the samples.

    Raises:
        CheckpointError: weights are not finite.
        NumericsError: the weights are, the losses are not.
    """
    bad_B = ~losses_B.isfinite()
    if not bad_B.any():
        return
    unsupervised_B = supervised_tokens(batch.labels) == 0
    _refuse(
        unsupervised_B,
        batch,
        "no token counts in the loss",
        "leave these samples out: every label is masked, or the only one stands at the first token, which nothing "
        "predicts",
    )
    check_weights(model)
    _refuse(bad_B, batch, "the loss is not finite", "scan in another format: model.dtype=float32")


def check_weights(model: nn.Module) -> None:
    """Refuse weights that are not finite, naming the tensors."""
    bad = [
        name
        for name, weight in model.named_parameters()
        if weight.is_floating_point() and weight.device.type != "meta" and not weight.isfinite().all()
    ]
    if bad:
        raise CheckpointError(
            f"{len(bad)} tensors hold weights that are not finite",
            where=", ".join(bad[:3]) + (" ..." if len(bad) > 3 else ""),
            do="download or copy the checkpoint again, or model.dtype=float32 if its numbers are too large for float16",
        )


def check_gradients(
    totals_B: Float[Tensor, "B"], losses_B: Float[Tensor, "B"], batch: TokenBatch, model: nn.Module
) -> None:
    """Refuse samples whose gradients are all zero or not finite, naming them and the likely cause.

    Args:
        totals_B: every sample's Σ‖∇‖ over all layers.
        losses_B: their losses.
        batch: the samples.
        model: which was scanned.
    """
    _refuse(
        ~totals_B.isfinite(),
        batch,
        "the gradients are not finite",
        "model.dtype=float32; if it is, the checkpoint's weights are scaled beyond its range",
    )
    silent_B = totals_B == 0
    _refuse(silent_B & (losses_B == 0), batch, "the loss is exactly zero, and so are all gradients", _NO_LOSS)
    dtype = model.get_input_embeddings().weight.dtype  # type: ignore[operator]
    _refuse(silent_B, batch, "all gradients are zero", _UNDERFLOW if dtype != torch.float32 else _NO_PATH)


_NO_LOSS = "leave these samples out: the model is certain of every supervised token (a single one, perhaps)"
_UNDERFLOW = "model.dtype=float32: gradients this small vanish in half precision"
_NO_PATH = "check that the checkpoint's FFN weights are not all zero"


def _refuse(bad_B: Bool[Tensor, "B"], batch: TokenBatch, what: str, do: str) -> None:
    names = [name for name, bad in zip(batch.names, bad_B.tolist(), strict=True) if bad]
    if names:
        raise NumericsError(f"{what} in {len(names)} of {len(batch.names)} samples", where=", ".join(names), do=do)
