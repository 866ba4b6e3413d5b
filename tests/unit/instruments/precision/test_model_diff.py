"""FP32 against low precision: faults are found and named, and healthy models pass."""

import json

import pytest
import torch
from pico_moes import make_moe
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from instruments.errors import ConfigError, NumericsError
from instruments.precision.findings import notes_of, rows_of, to_json
from instruments.precision.model_diff import auto_diff
from instruments.precision.verdict import Verdict

B, T, D, F = 2, 7, 96, 700


class Block(nn.Module):
    def __init__(self, up=None, down=None):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up, self.down = up or nn.Linear(D, F), down or nn.Linear(F, D)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Sequential(nn.Linear):
    """Adds products one by one, in the dtype of its input."""

    def forward(self, x):
        weight = self.weight.to(x.dtype)
        total = x.new_zeros(*x.shape[:-1], self.out_features)
        for unit in range(self.in_features):
            total = total + x[..., unit, None] * weight[:, unit]
        return total


def stack(seed=0, **second):
    torch.manual_seed(seed)
    return Stack(Block(), Block(**second), Block())


def sample(seed=1):
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("precision", "mode", "seed"),
    [("bfloat16", "autocast", 0), ("float16", "autocast", 1), ("bfloat16", "cast", 2), ("float16", "cast", 0)],
)
def test_a_healthy_model_is_left_alone(precision, mode, seed):
    diff = auto_diff(stack(seed), sample(), precision=precision, mode=mode, seed=seed)
    assert diff.verdict is Verdict.OK, notes_of(diff)
    assert diff.first is None
    # The floor counts whole units; rounding to nearest errs uniformly by up to half a unit, 1/sqrt(12) RMS.
    down = next(output for output in diff.outputs if output.name == "blocks.1.down")
    assert 0.2 < down.own.normalised_l2 / down.own_floor < 0.45
    assert 0.15 < down.propagated.normalised_l2 / down.propagated_floor < 0.45
    assert [output.name for output in diff.outputs][-1] == "(model)"


@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_a_layer_that_overflows_in_fp16_is_named(mode):
    model = stack()
    with torch.no_grad():
        model.blocks[1].up.bias[3] = 7e4  # finite in fp32, infinite in fp16
        model.blocks[1].down.weight[:, 3] = 0
    assert auto_diff(model, sample(), precision="bfloat16", mode=mode).verdict is Verdict.OK
    diff = auto_diff(model, sample(), precision="float16", mode=mode)
    assert diff.verdict is Verdict.SEVERE
    assert diff.first.name == "blocks.1.up"
    assert diff.first.own.nonfinite == B * T
    assert rows_of(diff)[0][:3] == ("blocks.1.up", "severe", "14 not finite")


def test_a_layer_that_sums_in_bf16_is_named():
    model = stack(down=Sequential(F, D))
    diff = auto_diff(model, sample(), mode="cast")
    assert diff.first.name == "blocks.1.down"
    assert diff.first.own.normalised_l2 > 3 * diff.first.own_floor
    assert diff.first.own_verdict is Verdict.WARNING
    guilty = {output.call.module for output in diff.outputs if output.own_verdict is not Verdict.OK}
    assert guilty <= {"blocks.1.down", "blocks.1", ""}
    before = [output for output in diff.outputs if output.name.startswith("blocks.0")]
    assert all(output.verdict is Verdict.OK for output in before)


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_rotary_frequencies_cast_with_the_model(model_type):
    """`model.to(bfloat16)` rounds the rotary frequencies; `from_pretrained(dtype=)` keeps them in fp32."""
    sizes = {
        "num_hidden_layers": 1, "hidden_size": 24, "intermediate_size": 40, "vocab_size": 61, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))
    ids = torch.randint(0, 61, (1, 400), generator=torch.Generator().manual_seed(3))
    assert auto_diff(model, {"input_ids": ids}).verdict is Verdict.OK
    diff = auto_diff(model, {"input_ids": ids}, mode="cast")
    assert diff.first.call.module == "model.rotary_emb"


class Odd(nn.Module):
    """Its modules return every kind of output."""

    def __init__(self):
        super().__init__()
        self.line, self.never = nn.Linear(D, D), nn.Linear(D, 3)
        self.twice = nn.LayerNorm(D)
        self.word, self.tensors = Word(), Tensors()
        self.gate = nn.ReLU(inplace=True)

    def forward(self, x):
        self.word(x)
        return self.tensors(self.gate(self.twice(self.line(self.twice(x)))))


class Word(nn.Module):
    def forward(self, x):
        return "no tensor"


class Tensors(nn.Module):
    def forward(self, x):
        return {"all": [x, None], "empty": x[:0], "count": torch.tensor(len(x)), "order": x.argsort(-1)[..., :3]}


def test_odd_outputs_are_compared_or_reported():
    torch.manual_seed(0)
    model = Odd().train()
    diff = auto_diff(model, sample(), modules=["*"])
    assert diff.verdict is Verdict.OK, notes_of(diff)
    assert diff.unused == ["never"]
    names = [output.name for output in diff.outputs]
    assert names[:4] == ["twice", "line", "twice (call 2)", "gate"]
    assert {"tensors['all'][0]", "tensors['empty']"} <= set(names)
    assert [choice.path for choice in diff.choices if choice.call.module == "tensors"] == ["['order']"]
    assert model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    json.dumps(to_json(diff), allow_nan=False)


def test_a_model_in_low_precision_is_compared_with_a_copy():
    model = stack().to(torch.bfloat16)
    diff = auto_diff(model, sample(), mode="cast")
    assert diff.verdict is Verdict.OK
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


class Fussy(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Linear(D, D)

    def forward(self, x):
        return self.table(x) @ torch.ones(D, 3)


def test_settings_and_models_that_do_not_work():
    for settings in ({"precision": torch.float8_e4m3fn}, {"mode": "half"}, {"modules": ["layers.*"]}):
        with pytest.raises(ConfigError, match="|".join(settings)):
            auto_diff(stack(), sample(), **settings)
    with pytest.raises(NumericsError) as error:
        auto_diff(Fussy(), sample(), mode="cast")
    assert error.value.where == "mode=cast, in (model)"
    assert auto_diff(Fussy(), sample()).verdict is Verdict.OK


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen2_moe", "glm4_moe", "granitemoe"])
def test_a_healthy_moe_is_left_alone_though_tokens_change_experts(model_type):
    torch.manual_seed(0)
    ids = torch.randint(0, 61, (2, 37), generator=torch.Generator().manual_seed(0))
    diff = auto_diff(make_moe(model_type), {"input_ids": ids})
    assert diff.verdict is Verdict.OK, notes_of(diff)


class Router(nn.Linear):
    def forward(self, x):
        return super().forward(x).topk(2, dim=-1).indices


class Choosing(nn.Module):
    """Two of nine experts for each token; the router's logits are close together."""

    def __init__(self):
        super().__init__()
        self.router, self.after = Router(D, 9), nn.LayerNorm(D)
        self.experts = nn.Parameter(torch.randn(9, D))

    def forward(self, x):
        return self.after(x + self.experts[self.router(x)].sum(-2))


def test_other_choices_are_counted_and_not_taken_for_errors():
    torch.manual_seed(0)
    model = Choosing()
    x = torch.randn(3, 401, D, generator=torch.Generator().manual_seed(1))
    diff = auto_diff(model, {"x": x})
    (choice,) = diff.choices
    assert str(choice.call) == "router"
    assert 0 < choice.propagated < 0.05
    assert diff.verdict is Verdict.OK, notes_of(diff)


class Wrapper(nn.Module):
    """Passes all arguments on, as PEFT and DistributedDataParallel do."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args, **kwargs):
        return self.model(*args, **kwargs)


def test_a_wrapped_model_writes_no_cache():
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=61, **sizes))
    plain, wrapped = (auto_diff(one, {"input_ids": torch.arange(12).view(3, 4)}) for one in (model, Wrapper(model)))
    errors = {one.name: one.propagated for one in wrapped.outputs}
    assert len(plain.outputs) > 10
    for one in plain.outputs:
        assert errors[f"model.{one.name}" if one.call.module else one.name] == one.propagated
