"""The teacher-forced forward pass."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from stages.data.batches import TokenBatch
from stages.metrics.loss import sample_losses


def forward_losses(model: nn.Module, batch: TokenBatch) -> Float[Tensor, "B"]:
    """Each sample's mean loss over its supervised tokens.

    With gradients enabled only the input embeddings require one, so that the graph reaches every layer and no weight
    gets a gradient.
    """
    device = next(model.parameters()).device
    embed = model.get_input_embeddings()  # type: ignore[operator]
    inputs = embed(batch.input_ids.to(device)).detach().requires_grad_(torch.is_grad_enabled())
    logits = model(inputs_embeds=inputs, attention_mask=batch.attention_mask.to(device), use_cache=False).logits
    return sample_losses(logits, batch.labels.to(device))
