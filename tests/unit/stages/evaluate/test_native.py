import pytest
import torch
from pico import write_pico
from pico_moes import make_moe
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

import models.tiny_onn.register  # noqa: F401 - from_config is to know the class
from models.config import ModelConfig, MoEShape
from models.ffn import watch_ffns
from models.loading import is_offloaded, load_carved, load_dense
from models.routing import LinearRouter
from models.training import find_routers
from stages.calibration.token_memory import TokenMemory
from stages.evaluate import comparison
from stages.evaluate.baselines import LayerFacts
from stages.evaluate.comparison import count_parameters, follow_ffns, watch_states
from stages.losses import measure_loss
from stages.text.batches import TokenBatch, TokenSequence, batch_sequences

L, D, V, E, N, K, S = 2, 24, 61, 5, 8, 2, 16
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pico(tmp_path_factory.mktemp("pico"), "llama", layers=L, hidden=D, vocab=V)


@pytest.fixture(scope="module")
def dense(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def batches():
    """A batch of two sequences of unequal length, and a batch of one sequence with two supervised tokens."""
    ids = torch.arange(3, 17).view(2, 7)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    ragged = TokenBatch(ids * mask, mask, ids.masked_fill(mask == 0, -100), ["a", "b"])
    ids = torch.arange(20, 25)[None]
    return [ragged, TokenBatch(ids, torch.ones_like(ids), torch.tensor([[-100, -100, 22, 23, -100]]), ["c"])]


def distances(dense, other, batches):
    """Mean KL(dense ‖ other) over the predictions that count, and the share where both choose the same token."""
    distances, equal = [], []
    for batch in batches:
        with torch.no_grad():
            wanted, found = (model(**batch.inputs(CPU)).logits.log_softmax(-1) for model in (dense, other))
        counts = torch.nn.functional.pad(batch.labels[:, 1:], (0, 1), value=-100) != -100
        distances.append((wanted.exp() * (wanted - found)).sum(-1)[counts])
        equal.append((wanted.argmax(-1) == found.argmax(-1))[counts])
    return float(torch.cat(distances).mean()), float(torch.cat(equal).double().mean())


def test_the_states_after_the_last_layer_are_kept_on_disk_if_memory_is_short(dense, batches, tmp_path):
    kept = []
    for room in (0, 10**9):
        with watch_states(dense, 14 + 5, TokenMemory(tmp_path, room)) as states:
            measure_loss(dense, batches)
        kept.append(states)
    assert [tuple(states.shape) for states in kept[0]] == [(2, 7, D), (1, 5, D)]
    assert all(map(torch.equal, *kept))
    torch.testing.assert_close(
        dense.lm_head(dense.model.norm(kept[0][1])), dense(batches[1].input_ids).logits, rtol=1e-5, atol=1e-5
    )
    assert_no_hooks(dense)


def assert_no_hooks(model):
    assert not any(module._forward_hooks for module in model.modules())


@pytest.fixture(scope="module")
def moe():
    sizes = {"hidden_size": D, "num_hidden_layers": L, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": E, "num_experts_per_tok": K, "moe_intermediate_size": N}
    return AutoModelForCausalLM.from_config(
        Qwen2MoeConfig(**sizes, **experts, vocab_size=V, shared_expert_intermediate_size=S)
    )


def test_a_token_passes_everything_but_the_experts_it_is_not_sent_to(dense, moe):
    total, active = count_parameters(moe, MoEShape(E, N, K, S))
    assert total == sum(parameter.numel() for parameter in moe.parameters())
    assert total - active == L * (E - K) * 3 * N * D + V * D  # one row of the input embedding is read
    total, active = count_parameters(dense, MoEShape(E, N, K, S))
    assert total - active == V * D


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_a_quantised_weight_counts_its_numbers_not_its_bytes(folder, dense, quantization):
    quantised = load_dense(ModelConfig(device="cpu", quantization=quantization), folder)
    assert count_parameters(quantised, MoEShape(E, N, K, S)) == count_parameters(dense, MoEShape(E, N, K, S))


def test_a_carved_model_larger_than_its_device_gives_the_same(moe, batches, tmp_path):
    moe.save_pretrained(tmp_path / "moe")
    logit_std = ModelConfig(device="cpu", device_map="auto", cpu_memory="1KB")
    carved = load_carved(tmp_path / "moe", logit_std, torch.float32, tmp_path)
    assert is_offloaded(carved)
    seen = []
    with watch_ffns(carved, lambda layer, _x, output_BTD: seen.append((layer, output_BTD.device.type))):
        loss = measure_loss(carved, batches, "carved")
    assert seen == [(0, "cpu"), (1, "cpu")] * 2
    assert loss.nats == pytest.approx(measure_loss(moe.eval(), batches, "carved").nats, rel=1e-6)
    assert count_parameters(carved, MoEShape(E, N, K, S)) == count_parameters(moe, MoEShape(E, N, K, S))


def test_load_is_that_of_the_models_own_choices(dense, batches):
    """A selection bias is added to sigmoids; on the logits of `facts.router` it is an approximation."""
    torch.manual_seed(3)
    carved = make_moe("glm4_moe").eval().requires_grad_(False)
    routers, counts = find_routers(carved), torch.zeros(L, E, dtype=torch.int64)
    for router in routers:
        router.weight.normal_()
        router.e_score_correction_bias.normal_(std=0.2)
    for batch in batches:
        mask_T, inputs = batch.attention_mask.flatten().bool(), []
        hooks = [
            router.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0]))
            for router in routers
        ]
        carved(batch.input_ids, attention_mask=batch.attention_mask)
        for layer, (router, x_BTD, hook) in enumerate(zip(routers, inputs, hooks, strict=True)):
            scores_TE = (x_BTD.view(-1, D)[mask_T] @ router.weight.T).sigmoid() + router.e_score_correction_bias
            counts[layer] += scores_TE.topk(K).indices.flatten().bincount(minlength=E)
            hook.remove()

    def facts_of(layer, ffn):
        router = routers[layer]
        linear = LinearRouter(router.weight, router.e_score_correction_bias / 0.25)
        neurons_EN = torch.arange(E * N).view(E, N)
        return LayerFacts(ffn, neurons_EN, torch.arange(0), linear, torch.ones(E * N), MoEShape(E, N, K, 0), 0)

    losses, layers = follow_ffns(dense, carved, batches, facts_of, MoEShape(E, N, K, 0))
    assert losses["dense"] == measure_loss(dense, batches)
    found = losses["carved"].divergence, losses["carved"].agreement
    assert found == pytest.approx(distances(dense, carved, batches), rel=1e-5)
    for layer, count_E in zip(layers, counts.double(), strict=True):
        assert layer.load == pytest.approx((count_E / count_E.mean()).tolist())
    assert_no_hooks(carved)


def test_padding_is_no_token_of_the_speed(monkeypatch):
    monkeypatch.setattr(comparison, "time_forward", lambda *_: 2.0)
    sequences = [TokenSequence(str(length), [1] * length, [1] * length) for length in (8, 2)]
    (batch,) = batch_sequences(sequences, 16, 0)
    assert comparison.measure_speed({"a": None}, [batch], 99) == {"a": 5.0}
