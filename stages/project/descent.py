"""Layer-wise gradient descent: a few steps on the experts of one layer towards its wanted output."""

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from models.expert_loop import ExpertLoop
from models.experts import LayerExperts
from stages.calibration.alignment import Target
from stages.calibration.guard import split_guard
from stages.project.config import ProjectConfig


def train_experts(
    loop: ExpertLoop, inputs: Sequence[Tensor], target: Target, settings: ProjectConfig, seed: int
) -> ExpertLoop:
    """Adam on the squared error of the layer's output, with the routing as it is; guard tokens are not seen.

    Copies of a unit become units of their own: each goes where its expert needs it.

    Args:
        loop: the layer as it is.
        inputs: its FFN inputs, a batch each.
        target: see `align_down`.
        settings: `descent_*` and `guard_share`.
        seed: of the order of the tokens.
    """
    fitted, _ = split_guard(len(inputs), settings.guard_share)
    x_TD = torch.cat([inputs[index] for index in fitted])
    wanted_TD = torch.cat([target(index, inputs[index]) for index in fitted])
    scale = wanted_TD.square().mean().clamp_min(1e-30)
    weights = {spec.name: getattr(loop.experts, spec.name).clone() for spec in fields(LayerExperts)}
    trained = [weight.requires_grad_() for weight in weights.values() if weight.numel()]
    groups = [
        {"params": [weight], "lr": settings.descent_rate * float(weight.detach().square().mean().sqrt())}
        for weight in trained
    ]
    # Fused: one pass over all weights, in a quarter of the plain one's time.
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=settings.descent_steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(settings.descent_steps):
        tokens_t = torch.randint(len(x_TD), (min(settings.descent_tokens, len(x_TD)),), generator=generator)
        tokens_t = tokens_t.to(x_TD.device)
        with torch.enable_grad():
            output_tD = replace(loop, experts=LayerExperts(**weights)).differentiable(x_TD[tokens_t])
            loss = (output_tD - wanted_TD[tokens_t]).square().mean() / scale
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return replace(loop, experts=LayerExperts(**{name: weight.detach() for name, weight in weights.items()}))
