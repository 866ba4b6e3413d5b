"""Routers are watched in every architecture and under gradient checkpointing."""

import torch

from models.training import RouterWatch, find_routers, selection_bias
from stages.losses import enable_gradient_checkpointing
from stages.train.objective import z_loss

IDS = torch.arange(14).view(2, 7)


def gradients_of_z(model, *, recompute):
    if recompute:
        enable_gradient_checkpointing(model)
    watch = RouterWatch(model)
    with watch.collect() as routings:
        output = model(IDS, use_cache=False)
    model.zero_grad()
    (output.logits.square().mean() + z_loss(routings, torch.arange(14))).backward()
    assert len(routings) == 2  # recomputation adds no entry
    watch.remove()
    return routings, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_what_is_seen_is_what_the_routers_decide(moe):
    routings, _ = gradients_of_z(moe, recompute=False)
    for routing, router in zip(routings, find_routers(moe), strict=True):
        assert routing.logits_TE.shape == (14, 5)
        scores = routing.logits_TE if selection_bias(router) is None else routing.logits_TE.sigmoid()
        best = scores.topk(2, dim=1).indices
        assert torch.equal(best.sort(1).values, routing.chosen_TK.sort(1).values)


def test_gradient_checkpointing_changes_no_gradient(moe):
    _, plain = gradients_of_z(moe, recompute=False)
    _, recomputed = gradients_of_z(moe, recompute=True)
    assert plain.keys() == recomputed.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, msg=name)


def test_removed_hooks_see_nothing(moe):
    watch = RouterWatch(moe)
    watch.remove()
    with watch.collect() as routings:
        moe(IDS, use_cache=False)
    assert routings == []
