"""All experts computed at once: the checkpoint's outputs and expert gradients, plus a gradient for the choice."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pico_moes import make_moe
from torch import nn
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from instruments.errors import ConfigError
from models import tiny_onn, training
from models.tiny_onn.sparse_ffn import TinyONNRouter
from models.training import (
    LARGE_PRODUCTS,
    STRAIGHT_THROUGH,
    RouterWatch,
    find_routers,
    part_of,
    selection_bias,
    show_scores,
    soft_choice,
)
from stages.losses import enable_gradient_checkpointing

GATES = {"num_experts_per_tok": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
IDS = torch.arange(14).view(2, 7)


@pytest.fixture
def moe(moe):
    """With a selection bias where the architecture has one."""
    for router in find_routers(moe):
        if (bias_E := selection_bias(router)) is not None:
            bias_E.copy_(torch.linspace(-0.1, 0.1, 5))
    return moe


def pass_through(model, implementation):
    """Run both passes; return logits, gradients by name, and routings."""
    model.set_experts_implementation(implementation)
    handles = show_scores(model) if implementation == STRAIGHT_THROUGH else []
    watch = RouterWatch(model)
    model.zero_grad()
    with watch.collect() as routings:
        logits = model(IDS, use_cache=False).logits
    logits.square().mean().backward()
    for handle in [*handles, watch]:
        handle.remove()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), gradients, routings


def test_values_and_the_experts_gradients_are_those_of_the_checkpoint(moe):
    wanted, plain, _ = pass_through(moe, "eager")
    found, gradients, _ = pass_through(moe, STRAIGHT_THROUGH)
    torch.testing.assert_close(found, wanted)
    # Only in the last layer: earlier experts also get gradients through the choices of later routers.
    last = [name for name in plain if ".layers.1." in name and part_of(name) == "experts"]
    assert last
    for name in last:
        torch.testing.assert_close(gradients[name], plain[name], msg=name)


@pytest.mark.parametrize("sequences", [1, 8])
def test_large_products_have_the_checkpoints_values(moe, sequences, monkeypatch):
    used, sum_all = [], training._sum_all
    monkeypatch.setattr(training, "_sum_all", lambda *given: used.append(given) or sum_all(*given))
    found = []
    for implementation in ("eager", LARGE_PRODUCTS):
        moe.set_experts_implementation(implementation)
        with torch.no_grad():
            found.append(moe(IDS[:1].repeat(sequences, 1), use_cache=False).logits)
    torch.testing.assert_close(*found)
    assert bool(used) == (sequences > 1)  # a few tokens read the chosen experts alone


def test_recomputation_changes_no_gradient(moe):
    _, plain, _ = pass_through(moe, STRAIGHT_THROUGH)
    enable_gradient_checkpointing(moe)
    _, recomputed, _ = pass_through(moe, STRAIGHT_THROUGH)
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, msg=name)


def test_the_scores_are_those_that_choose(moe):
    show_scores(moe)
    with RouterWatch(moe).collect() as routings:
        moe.set_experts_implementation(STRAIGHT_THROUGH)
        moe(IDS, use_cache=False)
    for layer, routing in zip(moe.model.layers, routings, strict=True):
        experts = next(module for module in layer.modules() if hasattr(module, "router_scores"))
        best_TK = experts.router_scores.topk(2, dim=1).indices
        assert torch.equal(best_TK.sort(1).values, routing.chosen_TK.sort(1).values)


def test_a_token_wants_the_expert_that_would_help_it():
    """Five experts, top-2, constant gates: the choice's gradient favours the expert whose output is the target."""
    torch.manual_seed(0)
    model = make_moe("glm4_moe").model.layers[1].mlp
    model.experts.config._experts_implementation = STRAIGHT_THROUGH
    x_TD = torch.randn(64, 24)
    scores_TE = torch.randn(64, 5, requires_grad=True)
    chosen_TK = scores_TE.topk(2, dim=1).indices
    gates_TK = torch.full((64, 2), 0.5)
    model.experts.router_scores = scores_TE
    with torch.no_grad():
        torch.nn.init.normal_(model.experts.gate_up_proj)
        torch.nn.init.normal_(model.experts.down_proj)
        alone_ETD = torch.stack([model.experts(x_TD, torch.full((64, 1), e), torch.ones(64, 1)) for e in range(5)])
        wanted_T = torch.randint(5, (64,))
        target_TD = 0.5 * alone_ETD[wanted_T, torch.arange(64)]
    (model.experts(x_TD, chosen_TK, gates_TK) - target_TD).square().sum().backward()
    away = ~(chosen_TK == wanted_T[:, None]).any(1)  # tokens whose best expert was not chosen
    pull_T = scores_TE.grad[torch.arange(64), wanted_T]
    assert away.sum() > 10
    assert float((pull_T[away] < 0).float().mean()) > 0.8  # gradient descent raises its score


def test_the_border_lies_between_chosen_and_others():
    scores_TE = torch.tensor([[0.0, 1.0, 3.0, 5.0], [2.0, 2.0, 2.0, 2.0]])
    soft_TE = soft_choice(scores_TE, torch.tensor([[2, 3], [0, 1]]))
    assert (soft_TE[0] > 0.5).tolist() == [False, False, True, True]
    assert soft_TE[0, 1] == pytest.approx(1 - float(soft_TE[0, 2]))
    assert soft_TE.isfinite().all()


@pytest.mark.parametrize("chosen", [[0], [0, 1, 2, 3], [0, 1]])
def test_without_a_border_nothing_is_to_be_learnt(chosen):
    """All experts are chosen, or their scores are equal."""
    scores_TE = torch.full((3, 1 if chosen == [0] else 4), 0.3, requires_grad=True)
    soft_choice(scores_TE, torch.tensor([chosen]).expand(3, len(chosen))).sum().backward()
    assert not scores_TE.grad.any()


def test_the_bias_of_a_router_from_remote_code_is_on_its_logits(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    folder = Path(tiny_onn.__file__).parent
    remote = get_class_from_dynamic_module("modeling_tiny_onn.TinyONNRouter", str(folder))
    assert remote is not TinyONNRouter
    router, model = remote(SimpleNamespace(num_experts=5, hidden_size=24, **GATES)), nn.Module()
    nn.init.normal_(router.weight)
    router.e_score_correction_bias.copy_(torch.linspace(-2, 2, 5))
    model.gate, model.experts = router, nn.Module()
    wrapper = nn.ModuleDict({"mlp": model})
    show_scores(wrapper)
    logits_TE, _, chosen_TK = router(torch.randn(9, 24))
    torch.testing.assert_close(model.experts.router_scores, logits_TE + router.e_score_correction_bias)
    assert torch.equal(model.experts.router_scores.topk(2).indices.sort(1).values, chosen_TK.sort(1).values)


def test_a_pool_is_refused_in_words():
    ffn = nn.ModuleDict({"gate": nn.Linear(24, 5, bias=False)})
    with pytest.raises(ConfigError) as caught:
        show_scores(nn.ModuleDict({"mlp": ffn}))
    assert (
        caught.value.what
        == "straight-through routers compute all experts for every token, in a pool those of all layers"
    )
