"""The loop over experts against the dense FFN, the carve in neuron space, and transformers' MoE layers."""

from dataclasses import replace

import pytest
import torch
from pico import write_pico
from transformers import AutoModelForCausalLM

import models.tiny_onn.register  # noqa: F401 - from_pretrained is to know the class
from models.config import MoEShape
from models.emit import emit_checkpoint
from models.experts import ExpertLoop, slice_experts, sum_blocks
from models.ffn import DenseFFN
from models.routing import GateKind, LinearRouter, active_copies, membership
from models.stream import LayerStream
from models.targets.base import gate_kind
from models.targets.config import MOE_TARGETS
from stages.evaluate.baselines import CarvedFFN

T, D, F, E, N, K = 7, 6, 17, 3, 4, 2
SILU = torch.nn.functional.silu


@pytest.fixture
def ffn():
    generator = torch.Generator().manual_seed(0)
    return DenseFFN(
        torch.randn(F, D, generator=generator),
        torch.randn(F, D, generator=generator),
        torch.randn(D, F, generator=generator),
        SILU,
    )


def make_loop(ffn, neurons_EN, always_S, top_k, scale_F=None):
    experts = slice_experts(ffn.projections, neurons_EN, always_S)
    if scale_F is not None:
        experts = replace(experts, down_EDN=experts.down_EDN * scale_F[neurons_EN.long()][:, None])
    rows_ED = torch.randn(len(neurons_EN), D, generator=torch.Generator().manual_seed(7))
    return ExpertLoop(experts, neurons_EN, always_S, LinearRouter.without_bias(rows_ED), top_k, ffn.width, ffn.act)


def draw_x():
    return torch.randn(T, D, generator=torch.Generator().manual_seed(2))


def test_all_experts_of_a_partition_are_the_dense_ffn(ffn):
    order = torch.randperm(F, generator=torch.Generator().manual_seed(4))
    loop = make_loop(ffn, order[:15].view(3, 5), order[15:], top_k=3)
    torch.testing.assert_close(loop(draw_x()), ffn(draw_x()), rtol=1e-5, atol=1e-5)


def test_the_parts_of_a_layer_sum_to_it(ffn):
    order = torch.randperm(F, generator=torch.Generator().manual_seed(4))
    loop = make_loop(ffn, order[:12].view(4, 3), order[12:], top_k=2)
    for parts in (2, 3):
        outputs = [loop.part(index, parts)(draw_x()) for index in range(parts)]
        torch.testing.assert_close(sum(outputs), loop(draw_x()), rtol=1e-5, atol=1e-5)


def test_all_experts_of_a_replicated_partition_are_the_dense_ffn(ffn):
    neurons_EN = torch.stack([torch.arange(first, first + 9) % F for first in (0, 6, 12)])
    scale_F = 1 / neurons_EN.flatten().bincount(minlength=F)
    assert scale_F.unique().tolist() == [0.5, 1.0]
    loop = make_loop(ffn, neurons_EN, torch.empty(0, dtype=torch.int64), top_k=3, scale_F=scale_F)
    torch.testing.assert_close(loop(draw_x()), ffn(draw_x()), rtol=1e-5, atol=1e-5)


def test_the_loop_equals_the_carve_in_neuron_space(ffn):
    # Neurons 3 and 8 are in two experts; 15 and 16 are always on; the rest are dropped.
    neurons_EN, always_S = torch.tensor([[0, 1, 3, 8], [3, 4, 5, 6], [7, 8, 9, 10]]), torch.tensor([15, 16])
    loop = make_loop(ffn, neurons_EN, always_S, K)
    member_EF = membership(neurons_EN, F)

    def features(x_TD):
        return ffn.hidden(x_TD) * active_copies(loop.router.choose(x_TD, K), member_EF, always_S)

    carved = CarvedFFN(features, ffn.down_DF)
    (blocks, output_TD), (expected, expected_TD) = loop.run(draw_x()), carved.run(draw_x())
    features_TF, expected_TF = (sum_blocks(found, len(output_TD), F) for found in (blocks, expected))
    torch.testing.assert_close(features_TF, expected_TF, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output_TD, expected_TD, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loop(draw_x()), output_TD)
    assert features_TF.amax() > 0
    assert not features_TF[:, 14].any()
    change_DF = torch.randn(D, F, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(
        loop.with_change(change_DF)(draw_x()), carved.with_change(change_DF)(draw_x()), rtol=1e-5, atol=1e-4
    )


def test_renaming_neurons_changes_nothing(ffn):
    neurons_EN, always_S = torch.arange(12).view(E, N), torch.tensor([15, 16])
    order_F = torch.randperm(F, generator=torch.Generator().manual_seed(6))
    renamed = DenseFFN(ffn.gate_FD[order_F], ffn.up_FD[order_F], ffn.down_DF[:, order_F], SILU)
    place_F = order_F.argsort()
    there = make_loop(renamed, place_F[neurons_EN], place_F[always_S], K)
    torch.testing.assert_close(there(draw_x()), make_loop(ffn, neurons_EN, always_S, K)(draw_x()), rtol=1e-5, atol=1e-5)


CARVES = [
    ("qwen3", "qwen3_moe", 0),
    ("llama", "mixtral", 0),
    ("qwen2", "qwen2_moe", 5),
    ("qwen2", "glm4_moe", 5),
    ("llama", "tiny_onn", 3),
]


def emit_routed(source, target, always_on, top_k, logit_std, tmp_path):
    """Make one layer as an ExpertLoop and as a module of transformers."""
    folder = write_pico(tmp_path / "dense", source, layers=1, hidden=24, intermediate=40)
    shape = MoEShape(experts=4, n=8, top_k=top_k, always_on=always_on)
    neurons_EN, always_S = torch.arange(32).view(4, 8), torch.arange(40 - always_on, 40)
    rows_ED = torch.randn(4, 24, generator=torch.Generator().manual_seed(8)) * logit_std
    biased = MOE_TARGETS[target].selection_bias is not None and logit_std < 1e-2
    bias_E = torch.tensor([0.0, 3e-4, -3e-4, 0.0]) if biased else torch.zeros(4)
    with LayerStream(folder, device=torch.device("cpu")) as stream:
        ffn = next(stream.layers()).ffn
    experts = slice_experts(ffn.projections, neurons_EN, always_S)
    emit_checkpoint(
        folder, tmp_path / "moe", target=MOE_TARGETS[target], shape=shape, routers=lambda _: rows_ED,
        experts=lambda _: experts,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.float32).eval()
    if biased:
        model.model.layers[0].mlp.gate.e_score_correction_bias.copy_(bias_E * MOE_TARGETS[target].selection_bias_scale)
    gate = GateKind(gate_kind(MOE_TARGETS[target], shape))
    loop = ExpertLoop(experts, neurons_EN, always_S, LinearRouter(rows_ED, bias_E), top_k, 40, ffn.act, gate)
    return loop, model.model.layers[0].mlp


@pytest.mark.parametrize("logit_std", [1e-4, 0.1])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize(("source", "target", "always_on"), CARVES)
def test_the_loop_equals_the_emitted_checkpoint(source, target, always_on, top_k, logit_std, tmp_path):
    """K < E; gates are nearly constant or differ between experts, and then train their router where they can.

    A renormalised top-1 gate is always 1 and trains no router; emission turns renormalisation off where it can.
    """
    loop, mlp = emit_routed(source, target, always_on, top_k, logit_std, tmp_path)
    x_TD = torch.randn(T, 24, generator=torch.Generator().manual_seed(9))
    output = mlp(x_TD[None])
    native_TD = (output[0] if isinstance(output, tuple) else output)[0]
    torch.testing.assert_close(native_TD.detach(), loop(x_TD), rtol=1e-4, atol=1e-5)
    if logit_std == 0.1:
        native_TD.square().sum().backward()
        learns = float(mlp.gate.weight.grad.abs().max()) > 1e-4 * float(x_TD.norm())
        assert learns is (top_k == 2 or target in {"qwen2_moe", "glm4_moe", "tiny_onn"})
