"""TinyONN in transformers: losses, gradient checkpointing, resizing, initialisation, placement and training."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from numerics.tiny_onn_carves import EXPERTS, HIDDEN, LAYERS, write_carve
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import models.tiny_onn.register  # noqa: F401
from models.tiny_onn.configuration_tiny_onn import TinyONNConfig
from models.tiny_onn.modeling_tiny_onn import TinyONNForCausalLM

TOP_K = 2
IDS = torch.arange(22).view(2, 11)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_carve(tmp_path_factory.mktemp("carve"), "qwen3", top_k=TOP_K) / "moe"


@pytest.fixture
def model(folder: Path) -> TinyONNForCausalLM:
    return route(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def route(model: TinyONNForCausalLM) -> TinyONNForCausalLM:
    """Set random router weights, so that experts depend on the token."""
    generator = torch.Generator().manual_seed(0)
    for layer in model.get_decoder().layers:
        nn.init.normal_(layer.mlp.gate.weight, std=0.3, generator=generator)
    return model


def make_pool(**keys: object) -> TinyONNForCausalLM:
    dense = AutoConfig.for_model(
        "qwen3", hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=61, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(
        TinyONNConfig(dense, EXPERTS, TOP_K, moe_intermediate_size=8, topology="global_pool", **keys)
    )


def gradients(model: TinyONNForCausalLM, **inputs: object) -> dict[str, Tensor]:
    model.zero_grad()
    model(IDS, labels=IDS, **inputs).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: name + text)


def test_gradient_checkpointing_changes_no_gradient(model) -> None:
    model.train()
    wanted = gradients(model, output_router_logits=True)
    model.activation_checkpointing_enable()
    assert_same(gradients(model, output_router_logits=True), wanted)


def test_reentrant_checkpointing_with_the_balance_loss_is_refused(model) -> None:
    model.train()
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    for parameter in model.get_input_embeddings().parameters():
        parameter.requires_grad_(requires_grad=True)
    with pytest.raises(ValueError, match="reentrant gradient checkpointing hides the routers"):
        model(IDS, labels=IDS, output_router_logits=True)


def test_the_balance_loss_is_that_of_transformers_for_one_layer(model) -> None:
    del model.get_decoder().layers[1:]
    assert model.config.router_aux_loss_coef == 0  # a carve's value, so that no trainer adds the loss unasked
    model.config.router_aux_loss_coef = 0.001
    mask = torch.ones_like(IDS)
    mask[1, 7:] = 0
    output = model(IDS, attention_mask=mask, labels=IDS, output_router_logits=True)
    assert [logits.shape for logits in output.router_logits] == [(22, EXPERTS)]
    # Softmax of these is each sigmoid's share of their sum.
    logits = tuple(map(nn.functional.logsigmoid, output.router_logits))
    expected = load_balancing_loss_func(logits, EXPERTS, TOP_K, mask)
    torch.testing.assert_close(output.aux_loss, expected)
    found, wanted = (torch.autograd.grad(loss, output.router_logits)[0] for loss in (output.aux_loss, expected))
    torch.testing.assert_close(found, wanted)
    plain = model(IDS, attention_mask=mask, labels=IDS)
    assert (plain.aux_loss, plain.router_logits) == (None, None)
    torch.testing.assert_close(output.loss, plain.loss + 0.001 * expected)


def test_the_configuration_can_ask_for_the_balance_loss(model) -> None:
    model.config.output_router_logits = True
    assert len(model(IDS).router_logits) == LAYERS
    assert not any(layer.mlp.gate._forward_hooks for layer in model.get_decoder().layers)


def test_tuples_come_when_asked_for(model) -> None:
    output = model(IDS, labels=IDS, return_dict=False)
    assert isinstance(output, tuple)
    assert output[1].shape == (2, 11, 61)


def test_it_generates_from_embeddings(model) -> None:
    written = model.generate(IDS, max_new_tokens=3, do_sample=False)
    found = model.generate(inputs_embeds=model.get_input_embeddings()(IDS), max_new_tokens=3, do_sample=False)
    assert torch.equal(found, written[:, IDS.shape[1] :])


def test_a_cache_is_taken_under_its_name_in_any_version(model) -> None:
    whole = model(IDS).logits
    for name in ("cache", "past_key_values"):
        start = model(IDS[:, :7], use_cache=True)
        kept = start.get("cache")
        torch.testing.assert_close(model(IDS[:, 7:], **{name: kept}).logits, whole[:, 7:])
        assert kept.get_seq_length() == IDS.shape[1]
    start = model(IDS[:, :-1], use_cache=True)
    written = model.generate(IDS, max_new_tokens=3, do_sample=False)
    again = model.generate(IDS, cache=start.get("cache"), max_new_tokens=3, do_sample=False)
    assert torch.equal(again, written)


def test_hidden_states_and_attention_maps_are_returned(model) -> None:
    model.set_attn_implementation("eager")
    output = model(IDS, output_hidden_states=True, output_attentions=True)
    assert len(output.hidden_states) == LAYERS + 1
    assert len(output.attentions) == LAYERS


def test_the_vocabulary_grows(model, tmp_path) -> None:
    before = model(IDS).logits
    model.resize_token_embeddings(67, mean_resizing=False)
    assert (model.config.vocab_size, model.config.dense.vocab_size) == (67, 67)
    torch.testing.assert_close(model(IDS).logits[..., :61], before)
    assert model(torch.full_like(IDS, 66), labels=torch.full_like(IDS, 66)).loss.isfinite()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_the_vocabulary_of_a_family_whose_loss_reads_its_size_from_the_dense_model_grows(tmp_path) -> None:
    carve = write_carve(tmp_path, "gemma2") / "moe"
    model = AutoModelForCausalLM.from_pretrained(carve, dtype=torch.float32)
    model.resize_token_embeddings(67, mean_resizing=False)
    assert model(IDS, labels=IDS).loss.isfinite()


def test_a_head_put_in_its_place_is_used_and_a_copy_stands_alone(model) -> None:
    twin = copy.deepcopy(model)
    before = model(IDS).logits
    model.lm_head = nn.Linear(HIDDEN, 5, bias=False)
    assert model(IDS).logits.shape == (2, 11, 5)
    assert torch.equal(twin(IDS).logits, before)
    assert twin._dense.model is twin.model


def test_every_parameter_is_counted_once(model) -> None:
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert len(names) == len(set(names))
    assert not [name for name in names if not name.startswith(("model.", "lm_head."))]
    assert [name for name, _ in model.named_children()] == ["model", "lm_head"]


def test_a_model_from_its_configuration_starts_like_any_other() -> None:
    config = make_pool().config
    config.topology = "per_layer"
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            assert 0.015 < parameter.std() < 0.025, name
    assert not any(layer.mlp.gate.e_score_correction_bias.any() for layer in model.get_decoder().layers)
    assert abs(float(model(IDS, labels=IDS).loss.detach()) - torch.log(torch.tensor(61.0))) < 0.2


def test_missing_weights_are_filled_like_any_other(folder) -> None:
    config = AutoConfig.from_pretrained(folder)
    config.num_experts = EXPERTS + 1
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, ignore_mismatched_sizes=True)
    for layer in model.get_decoder().layers:
        assert 0.015 < layer.mlp.experts.down_proj.std() < 0.025
        assert not layer.mlp.gate.e_score_correction_bias.any()


def test_layers_that_are_placed_apart_compute_the_same(folder, model, tmp_path) -> None:
    parts = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    places = dict.fromkeys([*parts, "model.layers.0", "model.layers.2"], "cpu") | {"model.layers.1": "disk"}
    placed = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map=places, offload_folder=tmp_path
    )
    assert placed._no_split_modules == {"Qwen3DecoderLayer"}
    for layer in model.get_decoder().layers:
        nn.init.zeros_(layer.mlp.gate.weight)
    assert placed.get_decoder().layers[1].mlp.experts.down_proj.is_meta
    torch.testing.assert_close(placed(IDS).logits, model(IDS).logits, rtol=0, atol=1e-6)


def test_a_pool_is_held_once_and_learns_from_every_layer(tmp_path) -> None:
    model = route(make_pool(shared_intermediate_size=3))
    names = [name for name in model.state_dict() if "experts." in name and "shared" not in name]
    assert names == ["experts.gate_up_proj", "experts.down_proj"]
    wanted = gradients(model, output_router_logits=True)
    model.set_experts_implementation("eager")
    assert_same(gradients(model, output_router_logits=True), wanted)
    model.train()
    model.activation_checkpointing_enable()
    assert_same(gradients(model, output_router_logits=True), wanted)
    model.eval().save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(again(IDS).logits, model(IDS).logits, rtol=0, atol=1e-6)
    assert again(IDS, output_router_logits=True).aux_loss > 0


@pytest.mark.parametrize("pooled", [False, True])
def test_replicas_of_data_parallel_compute_with_their_own_weights(model, replicate, pooled) -> None:
    original = route(make_pool()) if pooled else model
    wanted, replicas = original(IDS).logits, replicate(original)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.zero_()
    for replica in replicas:
        assert torch.equal(replica(IDS).logits, wanted)


def test_label_smoothing_predicts_the_next_token(model, tmp_path) -> None:
    arguments = TrainingArguments(tmp_path, label_smoothing_factor=0.25, report_to=[], use_cpu=True)
    loss = Trainer(model, arguments).compute_loss(model, {"input_ids": IDS, "labels": IDS})
    log_TV = model(IDS).logits[:, :-1].log_softmax(-1)
    next_T = log_TV.gather(-1, IDS[:, 1:, None])
    torch.testing.assert_close(loss, -(0.75 * next_T.mean() + 0.25 * log_TV.mean()))


def test_a_trainer_trains_the_router_and_the_experts_and_evaluates_them(model, tmp_path) -> None:
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    arguments = TrainingArguments(
        tmp_path, max_steps=2, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[], use_cpu=True,
        activation_checkpointing=True, save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    model.config.output_router_logits = True
    texts = Dataset.from_dict({"input_ids": IDS, "labels": IDS})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Trainer's own deprecations
        trainer = Trainer(model, arguments, train_dataset=texts, eval_dataset=texts)
        trainer.train()
        found = trainer.evaluate()["eval_loss"]
    assert found == pytest.approx(model(IDS, labels=IDS).loss.item())
    still = [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]
    assert still == []
