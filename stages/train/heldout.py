"""The held-out loss while training: every process reads its share."""

from contextlib import nullcontext

import torch
from transformers import PreTrainedModel

from stages.contracts.workers import Workers
from stages.data.batches import TokenBatch
from stages.metrics.model_loss import measure_loss
from stages.train.balance import add_up


def heldout_loss(model: PreTrainedModel, batches: list[TokenBatch], workers: Workers, precision: str) -> float:
    """Mean nats per supervised token over all batches, with every process reading its share of them.

    Args:
        model: left in the mode it was in.
        batches: the whole text, the same in every process.
        workers: who reads.
        precision: float32, or bfloat16 for autocast, as training computes.
    """
    device = next(model.parameters()).device
    half = torch.autocast(device.type, torch.bfloat16) if precision == "bfloat16" else nullcontext()
    was_training = model.training
    model.eval()
    with half:
        mine = measure_loss(model, batches[workers.rank :: workers.world]) if workers.rank < len(batches) else None
    model.train(was_training)
    sums = torch.tensor([mine.total, mine.tokens] if mine else [0.0, 0.0], dtype=torch.float64, device=device)
    total, tokens = add_up(sums).tolist()
    return float(total / tokens)
