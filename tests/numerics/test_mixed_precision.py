"""Training under autocast: experts multiply in bfloat16, routers in float32, and without autocast nothing changes."""

import pytest
import torch
from pico_moes import make_moe
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from models.training import (
    AUTOCAST_IMPLEMENTATION,
    STRAIGHT_THROUGH,
    RouterWatch,
    _CastExperts,
    exempt_routers,
    find_routers,
    show_scores,
)
from stages.losses import enable_gradient_checkpointing
from stages.train.stage import load_trainable

IDS = torch.arange(14).view(2, 7)


def both_passes(model, *, half):
    """Logits, routings, and gradients by name."""
    watch = RouterWatch(model)
    model.zero_grad()
    with watch.collect() as routings, torch.autocast("cpu", torch.bfloat16, enabled=half):
        logits = model(IDS, use_cache=False).logits
    logits.float().square().mean().backward()
    watch.remove()
    return logits.detach(), routings, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_without_autocast_it_is_grouped_mm(moe):
    moe.set_experts_implementation("grouped_mm")
    wanted, _, gradients = both_passes(moe, half=False)
    moe.set_experts_implementation(AUTOCAST_IMPLEMENTATION)
    exempt_routers(moe)
    found, _, others = both_passes(moe, half=False)
    assert torch.equal(found, wanted)
    for name, gradient in gradients.items():
        assert torch.equal(others[name], gradient), name


def test_experts_multiply_in_the_autocast_format(moe, monkeypatch):
    moe.set_experts_implementation(AUTOCAST_IMPLEMENTATION)
    seen, original = [], torch.nn.functional.grouped_mm

    def spy(a, b, **rest):
        seen.append((a.dtype, b.dtype))
        return original(a, b, **rest)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", spy)
    both_passes(moe, half=True)
    assert seen == [(torch.bfloat16, torch.bfloat16)] * 4  # two products in each of two layers


def test_weights_that_an_adapter_computes_are_cast_too():
    """PEFT trains experts by a parametrization, whose result is no nn.Parameter."""

    class Adapter(nn.Module):
        def forward(self, weight):
            return weight + 0.01

    moe = make_moe("qwen3_moe")
    experts = moe.model.layers[0].mlp.experts
    register_parametrization(experts, "gate_up_proj", Adapter())
    cast = _CastExperts(experts, torch.bfloat16)
    assert [cast.gate_up_proj.dtype, cast.down_proj.dtype] == [torch.bfloat16] * 2
    torch.testing.assert_close(cast.gate_up_proj, experts.gate_up_proj.bfloat16())


@pytest.mark.parametrize("implementation", [AUTOCAST_IMPLEMENTATION, STRAIGHT_THROUGH])
def test_routers_compute_in_float32(moe, implementation):
    moe.set_experts_implementation(implementation)
    shown = show_scores(moe) if implementation != AUTOCAST_IMPLEMENTATION else []
    exempt_routers(moe)
    inputs = []
    hooks = [router.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for router in find_routers(moe)]
    _, routings, _ = both_passes(moe, half=True)
    assert len(inputs) == 2
    for router, x, routing in zip(find_routers(moe), inputs, routings, strict=True):
        assert routing.logits_TE.dtype == torch.float32
        torch.testing.assert_close(routing.logits_TE, x.view(-1, 24).float() @ router.weight.T)
    for hook in [*shown, *hooks]:
        hook.remove()


def test_gradients_are_those_of_float32_up_to_rounding(moe):
    moe.set_experts_implementation(AUTOCAST_IMPLEMENTATION)
    exempt_routers(moe)
    for router in find_routers(moe):
        router.top_k = moe.config.top_k_experts = 5  # a token with another choice would have another gradient
    _, _, wanted = both_passes(moe, half=False)
    _, _, found = both_passes(moe, half=True)
    for name, gradient in wanted.items():
        assert found[name].dtype == torch.float32
        assert (found[name] - gradient).norm() <= 0.07 * gradient.norm() + 1e-6, name


def test_gradient_checkpointing_changes_no_gradient(moe):
    moe.set_experts_implementation(AUTOCAST_IMPLEMENTATION)
    exempt_routers(moe)
    _, _, plain = both_passes(moe, half=True)
    enable_gradient_checkpointing(moe)
    _, _, recomputed = both_passes(moe, half=True)
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, msg=name)


def test_training_loads_the_model_this_way(tmp_path):
    make_moe("glm4_moe").save_pretrained(tmp_path)
    model = load_trainable(tmp_path)
    assert model.config._experts_implementation == AUTOCAST_IMPLEMENTATION
    router, x_TD = find_routers(model)[0], torch.randn(3, 24)
    torch.nn.init.normal_(router.weight)
    with torch.autocast("cpu", torch.bfloat16):
        logits_TE, _, _ = router(x_TD)
    torch.testing.assert_close(logits_TE, x_TD @ router.weight.T)


@pytest.mark.parametrize("kernels", [STRAIGHT_THROUGH, AUTOCAST_IMPLEMENTATION])
def test_replicas_of_data_parallel_route_with_their_own_weights(replicate, kernels):
    moe = make_moe("glm4_moe")
    moe.set_experts_implementation(kernels)
    if kernels == STRAIGHT_THROUGH:
        show_scores(moe)
    exempt_routers(moe)
    replicas = replicate(moe)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = moe(IDS).logits
        with torch.no_grad():
            for parameter in moe.parameters():
                parameter.zero_()
        for replica in replicas:
            assert torch.equal(replica(IDS).logits, wanted)
            (logits_TE, _, _) = replica.model.layers[1].mlp.gate(torch.ones(3, 24))
            assert logits_TE.abs().min() > 0
