"""The teacher-forced forward pass."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from models.placement import input_device
from stages.data.batches import TokenBatch
from stages.metrics.loss import sample_losses


def forward_losses(model: nn.Module, batch: TokenBatch, *, spend_logits: bool = False) -> Float[Tensor, "B"]:
    """Each sample's mean loss over its supervised tokens.

    With gradients enabled only the output of the input embeddings requires one, so that the graph reaches every layer
    and no weight gets a gradient.

    Args:
        model: causal language model, its weights frozen.
        batch: B sequences.
        spend_logits: the backward pass writes over the logits, for a third of the memory. Not where a hook keeps them.
    """
    device = input_device(model)
    with _gradients_from_embeddings(model):
        logits = model(
            input_ids=batch.input_ids.to(device), attention_mask=batch.attention_mask.to(device), use_cache=False
        ).logits
    return sample_losses(logits, batch.labels.to(logits.device), spend=spend_logits)


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
