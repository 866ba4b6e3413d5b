"""A dense decoder is found by structure; what is none is refused with the reason."""

import json
from importlib.metadata import version

import pytest
import torch
from pico import FAMILIES, bare_decoder, decoder_of, edited_tensors, write_pico
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from instruments.errors import CheckpointError
from models import finding
from models.check import check_layers, check_tensors
from models.checkpoint.folder import read_checkpoint
from models.checkpoint.shards import DenseReader
from models.decoder import Rows
from models.finding import description_path, find_decoder, from_json
from models.source import EMBEDDED
from models.structure import build_empty, describe_model


def shapes_of(folder):
    return {name: entry.shape for name, entry in read_checkpoint(folder).items()}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_tensor_of_a_checkpoint_is_described(model_type, tmp_path):
    folder = write_pico(tmp_path, model_type, layers=3, intermediate=40, tie=True)
    decoder = find_decoder(folder)
    assert (decoder.depth, decoder.width, decoder.hidden, decoder.vocabulary) == (3, 40, 24, 61)
    assert decoder.tied
    assert check_tensors(decoder, shapes_of(folder)) == []
    names = [name for layer in range(3) for name in decoder.layer_names(layer)]
    assert {*names, *decoder.frame_names, *decoder.ffn_names} == {*decoder.shapes} == {*shapes_of(folder)}
    assert "mlp" not in str(names)


@pytest.mark.parametrize("size", [61, 60])
def test_a_tied_head_may_be_stored_too(size, tmp_path):
    folder = write_pico(tmp_path, "qwen3", tie=True)
    with edited_tensors(folder) as weights:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"][:size].clone()
    errors = [error.where for error in check_tensors(find_decoder(folder), shapes_of(folder))]
    assert errors == ([] if size == 61 else ["lm_head.weight is (60, 24), not (61, 24)"])


def test_gate_up_and_down_are_told_apart():
    """Lfm2 calls them w1, w3 and w2, and its activation is no module."""
    plan = decoder_of("lfm2", block_ff_dim=40, block_auto_adjust_ff_dim=False, full_attn_idxs=[1]).ffn
    assert (plan.gate, plan.up, plan.down, plan.act) == (Rows("w1"), Rows("w3"), "w2", ":silu")
    plan = decoder_of("phi3").ffn
    assert (plan.gate, plan.up) == (Rows("gate_up_proj", "first"), Rows("gate_up_proj", "second"))
    assert decoder_of("gemma2").ffn.activation == "gelu_pytorch_tanh"
    for name in ("quick_gelu", "mish"):
        assert decoder_of("llama", hidden_act=name).ffn.activation == name


def test_an_ffn_without_a_gate_is_one_with_equal_gate_and_up():
    plan = decoder_of("nemotron").ffn
    assert (plan.gate, plan.up, plan.down) == (Rows("up_proj"), Rows("up_proj"), "down_proj")
    assert (plan.act, plan.activation, plan.is_gated) == ("/act_fn", "relu2 without a gate", False)
    assert decoder_of("qwen3").ffn.is_gated


def test_an_activation_may_learn_and_nothing_else():
    assert decoder_of("apertus").ffn.activation == "XIELUActivation without a gate"
    with pytest.raises(CheckpointError, match=r"mlp\.factor learns, and is neither in a matrix nor in the activation"):
        describe_with(["learns"])


def test_tokens_of_several_tables_are_refused():
    with pytest.raises(CheckpointError, match="tokens are embedded by more than one table"):
        bare_decoder({"model_type": "csm", "architectures": ["CsmForConditionalGeneration"], "num_hidden_layers": 2})


def test_the_description_is_kept_and_read_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    config = {"model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 67}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    found = find_decoder(tmp_path / "model")
    (kept,) = (tmp_path / "tiny-onn").glob("*.json")
    assert from_json(json.loads(kept.read_text())) == found


def test_another_code_or_version_keeps_another_description(monkeypatch):
    monkeypatch.setattr(finding, "_code", finding._code.__wrapped__)
    places = [description_path(EMBEDDED, weights=False, text_only=False)]
    for name, other in (
        ("hash_code", lambda *_: "another"),
        ("version", lambda package: "9.9" if package == "torch" else version(package)),
        ("version", lambda package: "9.9" if package == "transformers" else version(package)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(finding, name, other)
            places.append(description_path(EMBEDDED, weights=False, text_only=False))
    assert len({*places}) == 4


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("gpt2", "no FFN is found: no module of it has two or three Linear layers"),
        ("bert", "no FFN is found: attention.self is no function of one tensor"),
        ("starcoder2", "has biases, which experts here do not have"),
        ("qwen2_moe", "a Mixture-of-Experts already"),
        ("t5", "an encoder-decoder is no model of the next token alone"),
        ("bart", "an encoder-decoder is no model of the next token alone"),
        ("clip", "a model of type clip has no text decoder that predicts the next token"),
        ("mistral3", "a model with several parts does not describe its text part"),
        ("biogpt", "the FFN is written in the layer's own code"),
        ("not_a_model", "cannot make a model of config.json"),
        (None, "cannot make a model of config.json"),
    ],
)
def test_what_has_no_gated_ffn_is_refused(model_type, why):
    with pytest.raises(CheckpointError, match=why) as refused:
        bare_decoder({"model_type": model_type, "num_hidden_layers": 2})
    assert refused.value.where
    assert refused.value.do


@pytest.mark.parametrize(("width", "why"), [(40, "is not act"), (48, "mlp: its neurons depend on each other")])
def test_neurons_that_depend_on_each_other_are_refused(width, why):
    """Gemma 3n keeps only the largest gates in its first layers."""
    sizes = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 61}
    kinds = {"layer_types": ["full_attention"] * 2, "activation_sparsity_pattern": [0.95, 0.0]}
    with pytest.raises(CheckpointError, match=why) as refused:
        decoder_of("gemma3n_text", intermediate_size=width, **kinds, **sizes)
    assert refused.value.where == "layer 0 of 2"


@pytest.mark.parametrize(("step", "where"), [(1, "layers 0, 1, 2, 3 of 4"), (2, "layers 1, 3 of 4")])
def test_a_mixture_of_experts_is_refused_with_its_layers(step, where):
    with pytest.raises(CheckpointError, match="the layer is a Mixture-of-Experts already") as refused:
        decoder_of("qwen2_moe", num_hidden_layers=4, decoder_sparse_step=step, num_experts=4, moe_intermediate_size=8)
    assert refused.value.where == where


@pytest.mark.parametrize("model_type", [None, "new_one"])
def test_code_of_the_checkpoint_is_neither_run_nor_asked_for(tmp_path, model_type, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda _question: pytest.fail("a question on the terminal"))
    (tmp_path / "modeling_x.py").write_text("raise SystemExit('run')")
    auto_map = {"AutoConfig": "modeling_x.Config", "AutoModelForCausalLM": "modeling_x.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "auto_map": auto_map}))
    with pytest.raises(CheckpointError, match="exists only as Python code in the checkpoint") as refused:
        find_decoder(tmp_path)
    assert refused.value.do == "choose a model that transformers has a class for"
    known = {"model_type": "llama", "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**known, "auto_map": auto_map}))
    assert find_decoder(tmp_path).model_class == "LlamaForCausalLM"


def test_an_ffn_that_layers_share_is_refused():
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=61, **sizes))
    model.model.layers[2].mlp = model.model.layers[0].mlp
    with pytest.raises(CheckpointError, match="its FFN is that of layer 0") as refused:
        describe_model(model, {}, {})
    assert refused.value.where == "layer 2 of 3"


class Odd(nn.Module):
    """An FFN by the usual names that computes something else."""

    def __init__(self, kind, hidden=24, width=40):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, width, bias=False) for _ in range(2))
        self.down_proj, self.act_fn, self.kind = nn.Linear(width, hidden, bias=False), nn.SiLU(), kind
        if kind == "learns":
            self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x):
        gate = self.act_fn(self.gate_proj(x))
        match self.kind:
            case "largest":
                gate = gate * (gate >= gate.topk(3, dim=-1).values[..., -1:])
            case "residual":
                return x + self.down_proj(gate * self.up_proj(x))
            case "sum":
                return self.down_proj(gate + self.up_proj(x))
            case "limited":  # as in DeepSeek 4, GLM 5, MiniMax M3 and Step 3.7
                return self.down_proj(gate.clamp(max=7.0) * self.up_proj(x).clamp(-7.0, 7.0))
            case "twice":
                return self.down_proj(gate * self.up_proj(self.down_proj(gate)))
            case "learns":
                return self.down_proj(gate * self.up_proj(x)) * self.factor
        return self.down_proj(gate * self.up_proj(x)) * (3 if self.kind == "scaled" else 1)


def describe_with(ffns):
    config = AutoConfig.for_model(**decoder_of("llama", num_hidden_layers=len(ffns)).config_json)
    model = build_empty(config)
    with torch.device("meta"):
        for layer, kind in zip(model.model.layers, ffns, strict=True):
            layer.mlp = Odd(kind) if isinstance(kind, str) else Odd("", width=kind) if kind else torch.nn.Identity()
    return describe_model(model, {}, {})


@pytest.mark.parametrize(
    ("ffns", "why"),
    [
        (["largest", "largest"], "what its last matrix reads is not act"),
        (["residual", "residual"], "changes its output after the last matrix"),
        (["sum", "sum"], "what its last matrix reads is not act"),
        (["limited", "limited"], "its gate or up is limited"),
        (["twice", "twice"], "does not use each of its matrices once"),
        ([40, "scaled", 48], "the layers' FFNs differ, and not by their width alone"),
        ([40, "sum", 40], "what its last matrix reads is not act"),
        ([None, None], "no FFN is found: no module of it has two or three Linear layers"),
        ([None, "sum", None], "what its last matrix reads is not act"),
    ],
)
def test_what_only_looks_like_a_gated_ffn_is_refused(ffns, why):
    with pytest.raises(CheckpointError, match=why):
        describe_with(ffns)
    assert describe_with(["", ""]).width == 40
    two_widths = describe_with([40, 48, 40])
    assert (two_widths.width, two_widths.narrow) == (48, {0: 40, 2: 40})
    hybrid = describe_with([None, 40, None])
    assert (hybrid.narrow, hybrid.lacking, [*map(hybrid.has_ffn, range(3))]) == ({0: 0, 2: 0}, 2, [False, True, False])
    assert describe_with(["scaled"]).ffn.down_scale == pytest.approx(3)


def test_a_factor_is_folded_into_the_weights(tmp_path):
    """Falcon-H1 scales gate and output."""
    config = AutoConfig.for_model(
        "falcon_h1", hidden_size=24, intermediate_size=40, num_hidden_layers=1, vocab_size=61, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8,
        mamba_n_groups=1, mlp_multipliers=[0.5, 0.25], pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with DenseReader(tmp_path) as reader:
        plan, stored = reader.decoder.ffn, load_file(tmp_path / "model.safetensors")
        assert (plan.gate_scale, plan.down_scale) == (pytest.approx(0.5), pytest.approx(0.25))
        down = stored["model.layers.0.feed_forward.down_proj.weight"]
        torch.testing.assert_close(reader.projection(0, "down"), down / 4)


def test_layers_beyond_the_tensors_are_refused_before_they_are_built():
    assert check_layers({"num_hidden_layers": 12, "max_window_layers": 28}, tensors=27) == []
    (error,) = check_layers({"num_hidden_layers": 10**7}, tensors=27)
    assert error.where == "num_hidden_layers=10000000"
    (error,) = check_layers({"text_config": {"num_hidden_layers": 28}}, tensors=27)
    assert error.where == "num_hidden_layers=28"
