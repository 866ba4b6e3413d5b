"""The loss of a whole model on a text."""

from collections.abc import Sequence

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from models.placement import input_device
from stages.data.batches import TokenBatch
from stages.metrics.loss import MeanLoss, supervised_tokens, token_losses


@torch.no_grad()
def measure_loss(model: PreTrainedModel, batches: Sequence[TokenBatch], name: str | None = None) -> MeanLoss:
    """Next-token loss over all supervised tokens; with a bar where the model has a name."""
    total, count, device = 0.0, 0, input_device(model)
    for batch in tqdm(batches, desc=f"loss of the {name} model", unit="batch", disable=name is None):
        logits = model(
            input_ids=batch.input_ids.to(device), attention_mask=batch.attention_mask.to(device), use_cache=False
        ).logits
        labels_BT = batch.labels.to(logits.device)
        total += float(token_losses(logits, labels_BT).double().sum())
        count += int(supervised_tokens(labels_BT).sum())
    return MeanLoss(total, count)
