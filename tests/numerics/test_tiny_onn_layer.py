"""The sparse FFN against a loop over tokens and experts: outputs and gradients, for every kernel."""

import pytest
import torch
from operator_counts import count_operators
from torch import Tensor
from torch.nn.functional import silu
from transformers.activations import ACT2FN

from models.tiny_onn.configuration_tiny_onn import TinyONNConfig
from models.tiny_onn.sparse_ffn import TinyONNExperts, TinyONNRouter, TinyONNSparseFFN

# Grouped kernels need aligned N and D.
T, D, E, N, K, S = 7, 24, 5, 8, 2, 3
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
ROUTINGS = {"normalised": {}, "as-is": {"norm_topk_prob": False, "routed_scaling_factor": 0.5}}


def make_config(implementation: str = "eager", **keys: object) -> TinyONNConfig:
    config = TinyONNConfig(
        dense={"model_type": "llama", "hidden_size": D, "num_attention_heads": 2}, num_experts=E,
        moe_intermediate_size=N, **{"num_experts_per_tok": K, "shared_intermediate_size": S} | keys,
    )  # fmt: skip
    config._experts_implementation = implementation
    return config


def make_layer(config: TinyONNConfig, pool: TinyONNExperts | None = None) -> TinyONNSparseFFN:
    layer = TinyONNSparseFFN(config, ACT2FN["silu"], None if pool is None else {"experts": pool})
    generator = torch.Generator().manual_seed(1)
    for tensor in (*layer.parameters(), *layer.buffers(), *(() if pool is None else pool.parameters())):
        torch.nn.init.normal_(tensor, std=0.5, generator=generator)
    return layer


def loop(layer: TinyONNSparseFFN, experts: TinyONNExperts, x_TD: Tensor, config: TinyONNConfig) -> Tensor:
    """Reference output, token by token."""
    rows = []
    for x_D in x_TD:
        logits_E = layer.gate.weight @ x_D
        chosen = sorted(range(E), key=lambda e: -(logits_E[e] + layer.gate.e_score_correction_bias[e]).item())[:K]
        scores_E = logits_E.sigmoid()
        total = sum(scores_E[e] for e in chosen) if config.norm_topk_prob else 1.0
        row_D = torch.zeros(D)
        for e in chosen:
            gate_ND, up_ND = experts.gate_up_proj[e][:N], experts.gate_up_proj[e][N:]
            expert_D = experts.down_proj[e] @ (silu(gate_ND @ x_D) * (up_ND @ x_D))
            row_D = row_D + scores_E[e] / total * config.routed_scaling_factor * expert_D
        if (shared := layer.shared_experts) is not None:
            h_S = silu(shared.gate_proj.weight @ x_D) * (shared.up_proj.weight @ x_D)
            row_D = row_D + shared.down_proj.weight @ h_S
        rows.append(row_D)
    return torch.stack(rows)


def gradients(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    return list(torch.autograd.grad((output * weights).sum(), inputs))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("always_on", "pooled"), [(S, False), (0, True)])
def test_outputs_and_gradients_equal_the_loop(implementation, routing, always_on, pooled) -> None:
    config = make_config(implementation, shared_intermediate_size=always_on, **ROUTINGS[routing])
    pool = TinyONNExperts(config, ACT2FN["silu"]) if pooled else None
    layer = make_layer(config, pool)
    experts = layer.experts if pool is None else pool
    x_TD = torch.randn(T, D, generator=torch.Generator().manual_seed(3), requires_grad=True)
    inputs = [x_TD, *layer.parameters(), *(() if pool is None else pool.parameters())]
    output, expected = layer(x_TD[None])[0], loop(layer, experts, x_TD, config)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    for found, wanted in zip(gradients(output, inputs), gradients(expected, inputs), strict=True):
        assert wanted.abs().max() > 0
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_the_loop_leaves_experts_alone_that_no_token_chose() -> None:
    layer = make_layer(make_config())
    layer.gate.e_score_correction_bias.copy_(torch.tensor([0.0, 0.0, 99.0, 98.0, 0.0]))
    layer(torch.randn(T, D)).sum().backward()
    assert layer.experts.down_proj.grad.flatten(1).any(1).tolist() == [False, False, True, True, False]


def test_the_loop_waits_for_no_expert() -> None:
    """On a GPU, generation with E experts waited E times in every layer for every token."""
    config = make_config()
    layer = make_layer(config)
    with torch.no_grad():
        assert not count_operators(layer, torch.randn(T, D)).waits


@pytest.mark.parametrize("autocast", [False, True])
def test_routing_is_computed_in_fp32(autocast) -> None:
    router = TinyONNRouter(make_config())
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(6))
    router.e_score_correction_bias.copy_(torch.linspace(-2, 2, E))  # of the choice alone
    x_TD = torch.randn(T, D, generator=torch.Generator().manual_seed(7)).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits_TE, gates_TK, _ = router(x_TD)
    assert (logits_TE.dtype, gates_TK.dtype) == (torch.float32, torch.float32)
    assert torch.equal(logits_TE, x_TD.float() @ router.weight.T)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_half_precision_in_half_precision_out(implementation) -> None:
    layer = make_layer(make_config(implementation)).bfloat16()
    x_TD = torch.randn(T, D, generator=torch.Generator().manual_seed(8))
    output_TD = layer(x_TD.bfloat16())
    assert output_TD.dtype == torch.bfloat16
    torch.testing.assert_close(output_TD.float(), layer.float()(x_TD.bfloat16().float()), rtol=0.05, atol=0.1)


def test_no_tokens_no_output() -> None:
    assert make_layer(make_config())(torch.empty(0, D)).shape == (0, D)
