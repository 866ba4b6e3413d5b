"""Emission: refused inputs, copied files, number formats and layouts; tests/numerics compares the logits."""

import json
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from pico import edited_tensors, write_pico
from transformers import AutoModelForCausalLM, AutoTokenizer
from zoo.checkpoints import write_checkpoint

from instruments.errors import CheckpointError, ContractError, NumericsError
from models.checkpoint.shards import ShardReader
from models.config import MoEShape
from models.emit import checkpoint_dtype, emit_checkpoint
from models.experts import ExpertWeights
from models.targets.config import MOE_TARGETS
from models.training import RouterWatch, parameter_groups

SHAPE = MoEShape(experts=3, n=8, top_k=2, always_on=5)


def random_experts(layer):
    generator = torch.Generator().manual_seed(layer)
    sizes = ((3, 8, 24), (3, 8, 24), (3, 24, 8), (5, 24), (5, 24), (24, 5))
    return ExpertWeights(*(torch.randn(size, generator=generator) for size in sizes))


def emit(dense, out, target="qwen2_moe", *, experts=random_experts, router=None, shape=SHAPE, **more):
    rows = torch.ones(3, 24) if router is None else router
    emit_checkpoint(
        dense, out, target=MOE_TARGETS[target], shape=shape, routers=lambda _layer: rows, experts=experts, **more
    )
    return out


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = write_pico(tmp_path_factory.mktemp("dense"), "qwen2", tokenizer=True)
    (folder / "LICENSE").write_text("terms of the dense model")
    return folder


@pytest.mark.parametrize(
    ("source", "tokenizer_class", "target"),
    [
        ("olmo2", "GPT2Tokenizer", "tiny_onn"),
        ("qwen3", "Qwen2Tokenizer", "glm4_moe"),
        ("qwen2", "LlamaTokenizerFast", "qwen2_moe"),
        ("llama", None, "qwen2_moe"),
        ("qwen3", None, "tiny_onn"),
        ("qwen3", "no tokenizer.json", "glm4_moe"),
    ],
)
def test_the_tokens_are_the_dense_models_though_the_class_follows_the_architecture(
    tmp_path, source, tokenizer_class, target
):
    dense = write_pico(tmp_path / "dense", source, layers=1, tokenizer=True)
    path = dense / "tokenizer_config.json"
    settings = {"eos_token": "<|endoftext|>", "tokenizer_class": tokenizer_class, "note": "é"}
    path.unlink()
    if tokenizer_class == "no tokenizer.json":
        whole = dense / "tokenizer.json"
        model = json.loads(whole.read_text())["model"]
        (dense / "vocab.json").write_text(json.dumps(model["vocab"]))
        (dense / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
        whole.unlink()
    elif tokenizer_class:
        path.write_text(json.dumps(settings))
    out = emit(dense, tmp_path / "moe", target)
    before, after = (
        AutoTokenizer.from_pretrained(folder, trust_remote_code=target == "tiny_onn") for folder in (dense, out)
    )
    text = "def f(x):\n    return 12345 + x  # don't\n\n<|user|> Hi<|endoftext|>"
    assert after(text)["input_ids"] == before(text)["input_ids"]
    assert after.decode(after(text)["input_ids"]) == before.decode(before(text)["input_ids"])
    assert (after.pad_token, after.eos_token, after.bos_token) == (before.pad_token, before.eos_token, before.bos_token)
    assert after.padding_side == before.padding_side
    # transformers 4.57 reads it there, and would else give token_type_ids.
    stored = json.loads((out / "tokenizer_config.json").read_text())
    assert stored["model_input_names"] == before.model_input_names
    if path.exists():
        assert json.loads((out / path.name).read_text())["note"] == "é"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_number_format(dense, tmp_path, dtype):
    """Of all tensors but the selection bias."""
    with ShardReader(emit(dense, tmp_path / "qwen2", dtype=dtype)) as reader:
        assert {reader.dtype(name) for name in reader.names} == {getattr(torch, dtype)}
        shared_row = reader.tensor("model.layers.0.mlp.shared_expert_gate.weight")
    assert (shared_row > 0).all()
    assert shared_row.sum() < 1e-5
    with ShardReader(emit(dense, tmp_path / "glm4", "glm4_moe", dtype=dtype)) as reader:
        bias = reader.tensor("model.layers.0.mlp.gate.e_score_correction_bias")
    assert (bias.dtype, bias.tolist()) == (torch.float32, [0, 0, 0])


def test_the_weights_have_the_format_that_config_json_does_not_name(tmp_path):
    folder = write_pico(tmp_path, "qwen2", dtype=torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    assert checkpoint_dtype(folder, "source") == torch.bfloat16


def test_a_wrapper_may_name_the_format_of_its_text_part_alone(tmp_path):
    folder = write_checkpoint("mistral3_image", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"], config["text_config"]["dtype"]
    config["text_config"]["torch_dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config))
    assert checkpoint_dtype(folder, "source") == torch.bfloat16


def test_the_counter_of_a_batch_norm_stays_an_integer(tmp_path):
    """Of Emu 3's encoder of images."""
    sizes = ((3, 8, 64), (3, 8, 64), (3, 64, 8), (5, 64), (5, 64), (64, 5))
    experts = ExpertWeights(*map(torch.ones, sizes))
    dense, given = write_checkpoint("emu3_image", tmp_path / "dense"), {"experts": lambda _layer: experts}
    emit(dense, tmp_path / "moe", "tiny_onn", router=torch.ones(3, 64), dtype="bfloat16", **given)
    with ShardReader(tmp_path / "moe") as reader:
        dtypes = {name.endswith("num_batches_tracked"): reader.dtype(name) for name in reader.names if "norm" in name}
    assert dtypes == {True: torch.int64, False: torch.bfloat16}


@pytest.mark.parametrize("dtype", ["source", "float32", "bfloat16"])
def test_down_is_multiplied_in_float32_and_rounded_once(dense, tmp_path, dtype):
    """The scale 3 is no power of two; down is given in float32 and written in the gate's bfloat16."""
    given = vars(random_experts(0))
    experts = ExpertWeights(**{name: given[name] if name == "down_EDN" else given[name].bfloat16() for name in given})
    emit(dense, tmp_path, experts=lambda _layer: experts, shape=replace(SHAPE, top_k=3), dtype=dtype)
    with ShardReader(tmp_path) as reader:
        written = reader.tensor("model.layers.0.mlp.experts.0.down_proj.weight")
    expected = torch.float32 if dtype == "float32" else torch.bfloat16
    assert torch.equal(written, (experts.down_EDN[0] * 3).to(expected))
    assert not torch.equal(written, experts.down_EDN[0].to(expected) * 3) or expected == torch.float32


def test_always_on_neurons_are_written_as_their_architecture_weighs_them(dense, tmp_path):
    """Qwen2Moe's always-on neurons have a gate of σ(0) = ½."""
    emit(dense, tmp_path / "qwen2_moe")
    with ShardReader(tmp_path / "qwen2_moe") as reader:
        shared_DS = reader.tensor("model.layers.0.mlp.shared_expert.down_proj.weight")
    assert torch.equal(shared_DS[:, :5], 2 * random_experts(0).shared_down_DS)


def test_experts_and_routers_of_another_shape(dense, tmp_path):
    with pytest.raises(ContractError, match=r"experts of 8 neurons .* not 3 experts of 9 neurons") as caught:
        emit(dense, tmp_path / "narrow", shape=replace(SHAPE, n=9))
    assert (caught.value.where, caught.value.do) == ("layer 0", "stage=extract fresh=true")
    with pytest.raises(ContractError, match=r"router of shape \(4, 24\) for 3 experts"):
        emit(dense, tmp_path / "router", router=torch.ones(4, 24))


def test_tensors_that_transformers_does_not_read_are_left_out_with_a_warning(tmp_path, caplog):
    dense = write_pico(tmp_path / "dense", "qwen2", layers=1)
    more = {name: torch.ones(3) for name in ("mtp.fc.weight", "model.layers.0.self_attn.rotary_emb.inv_freq")}
    with edited_tensors(dense) as tensors:
        tensors.update(more)
    with ShardReader(emit(dense, tmp_path / "moe")) as reader:
        assert not more.keys() & {*reader.names}
    (warning,) = caplog.messages
    assert warning.startswith("1 tensors ")
    assert warning.endswith(": mtp.fc.weight ...")


@pytest.mark.parametrize(
    ("source", "target", "name", "other"),
    [
        ("qwen2", "qwen2_moe", "model.layers.0.mlp.experts.0.down_proj.weight", "glm4_moe"),
        ("granite", "granitemoeshared", "model.layers.0.block_sparse_moe.output_linear.weight", "tiny_onn"),
    ],
)
def test_a_gate_scale_that_overflows(tmp_path, source, target, name, other):
    dense = write_pico(tmp_path / "dense", source, layers=1)
    large = replace(random_experts(0), down_EDN=torch.full((3, 24, 8), 40_000.0))
    with pytest.raises(NumericsError, match="are not finite in float16") as caught:
        emit(dense, tmp_path / "moe", target, experts=lambda _layer: large, dtype="float16")
    assert caught.value.where == name
    assert caught.value.do == f"assemble.dtype=float32, or assemble.target={other}, which scales no weights"


@pytest.mark.parametrize("part", ["gate_END", "shared_down_DS"])
def test_weights_that_another_number_format_cannot_hold(dense, tmp_path, part):
    large = random_experts(0)
    large = replace(large, **{part: torch.full_like(getattr(large, part), 70_000.0)})
    with pytest.raises(NumericsError, match="weights up to 70000 are not finite in float16") as caught:
        emit(dense, tmp_path, "glm4_moe", experts=lambda _layer: large, dtype="float16")
    assert caught.value.do == "assemble.dtype=float32, or assemble.dtype=source"


def test_a_failed_emission_is_no_checkpoint(dense, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        emit(dense, tmp_path, experts=Mock(side_effect=[random_experts(0), KeyboardInterrupt]))
    assert list(tmp_path.iterdir()) == []


def test_the_source_is_never_overwritten(dense):
    with pytest.raises(CheckpointError, match="the MoE would overwrite its source"):
        emit(dense, dense / ".")


@pytest.mark.parametrize(
    ("given", "message"), [((2, 0), "the layers give 2 experts, not 3"), ((3, 1), "the layers give 4")]
)
def test_a_pool_is_what_the_layers_give(dense, tmp_path, given, message):
    def experts(layer):
        whole = random_experts(layer)
        wider = {
            name: torch.cat([getattr(whole, name)] * 2)[: given[layer]] for name in ("gate_END", "up_END", "down_EDN")
        }
        return replace(whole, **wider)

    with pytest.raises(ContractError, match=message):
        emit(dense, tmp_path, "tiny_onn", experts=experts, shape=replace(SHAPE, topology="global_pool"))
    assert not (tmp_path / "config.json").exists()


def gemma4(folder, **more):
    sizes = {"hidden_size_per_layer_input": 0, "global_head_dim": 8, "sliding_window": 4, **more}
    return write_pico(folder, "gemma4_text", layer_types=["sliding_attention", "full_attention"], **sizes)


def test_the_router_of_gemma4_reads_what_its_ffn_reads(tmp_path):
    rows_ED = torch.randn(3, 24, generator=torch.Generator().manual_seed(0))
    out = emit(gemma4(tmp_path / "dense"), tmp_path / "moe", "gemma4_text", router=rows_ED)
    model = AutoModelForCausalLM.from_pretrained(out)
    layer, found = model.model.layers[1], {}
    layer.mlp.register_forward_pre_hook(lambda _module, args: found.update(x=args[0][0]))
    layer.router.proj.register_forward_hook(lambda _module, _args, logits: found.update(logits=logits))
    watch = RouterWatch(model)
    with torch.no_grad(), watch.collect() as routings:
        model(torch.arange(7)[None])
    torch.testing.assert_close(found["logits"], found["x"] @ rows_ED.T, rtol=1e-5, atol=1e-5)
    assert torch.equal(routings[1].logits_TE, found["logits"])
    assert torch.equal(routings[1].chosen_TK, found["logits"].topk(2).indices)
    assert {str(group["name"]) for group in parameter_groups(model, rest_rate=1e-5)} == {"router", "experts", "rest"}
    fixed = {name.split(".", 3)[3] for name, weight in model.named_parameters() if not weight.requires_grad}
    assert fixed == {"mlp.down_proj.weight", "router.scale", "router.per_expert_scale"}


def test_gemma4_is_refused_where_its_numbers_vanish(tmp_path):
    with pytest.raises(NumericsError, match=r"beyond float16") as caught:
        emit(gemma4(tmp_path / "dense"), tmp_path / "moe", "gemma4_text", dtype="float16")
    assert caught.value.do == "assemble.dtype=bfloat16, or assemble.dtype=float32"
