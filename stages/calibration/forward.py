"""The teacher-forced forward pass."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.loading import input_device, is_offloaded
from stages.losses import sample_losses
from stages.text.sequences import TokenBatch


def forward_losses(model: nn.Module, batch: TokenBatch, *, inplace_backward_logits: bool = False) -> Float[Tensor, "B"]:
    """Each sample's mean loss over its supervised tokens.

    With gradients enabled only the output of the input embeddings requires one, so that the graph reaches every layer
    and no weight gets a gradient.

    Args:
        model: causal language model, its weights frozen.
        batch: B sequences.
        inplace_backward_logits: the backward pass writes over the logits, for a third of the memory. Not where a hook
            keeps them.
    """
    device = input_device(model)
    with _gradients_from_embeddings(model):
        logits = model(
            input_ids=batch.input_ids.to(device), attention_mask=batch.attention_mask.to(device), use_cache=False
        ).logits
    return sample_losses(logits, batch.labels.to(logits.device), inplace_backward=inplace_backward_logits)


@contextmanager
def _gradients_from_embeddings(model: nn.Module) -> Iterator[None]:
    def require_grad(_module: nn.Module, _args: object, embedded_BTD: Tensor) -> Tensor:
        if embedded_BTD.requires_grad or not torch.is_grad_enabled():
            return embedded_BTD
        return embedded_BTD.detach().requires_grad_()

    handle = model.get_input_embeddings().register_forward_hook(require_grad)  # type: ignore[operator]
    try:
        yield
    finally:
        handle.remove()


def save_memory(dense: PreTrainedModel, *, asked: bool) -> None:
    """Recompute where it is asked for, and where weights do not stay on the device.

    The graph would keep every offloaded weight until the backward pass; recomputed, one layer's are there at a time.
    """
    if asked or is_offloaded(dense):
        # 8-bit layers keep their inputs alive under the other kind.
        enable_gradient_checkpointing(dense, reentrant=getattr(dense, "is_loaded_in_8bit", False))


def enable_gradient_checkpointing(dense: PreTrainedModel, *, reentrant: bool = False) -> None:
    """Recompute layers in the backward pass, without switching dropout on as `train()` would."""
    # Renamed within transformers 5.
    enable = getattr(dense, "activation_checkpointing_enable", None) or dense.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    for layer in dense.get_decoder().layers:
        layer.training = True
