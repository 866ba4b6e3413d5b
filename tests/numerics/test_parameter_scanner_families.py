"""The scanner with default settings on unprepared models: every weight is exact or reported as left out."""

import pytest
import torch
from pico_moes import make_moe
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertConfig, Gemma2Config, GPT2Config, PhiConfig

from instruments.errors import ConfigError
from instruments.parameter_scan.scanner import ParameterTensorScanner

B, T, V = 3, 7, 61
SIZES = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
CONFIGS = {
    "gpt2": GPT2Config(vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=32, tie_word_embeddings=True),
    "gpt2, untied": GPT2Config(vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=32, tie_word_embeddings=False),
    "bert": BertConfig(**SIZES, max_position_embeddings=32),
    "phi": PhiConfig(**SIZES, max_position_embeddings=32),
    "gemma2": Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, max_position_embeddings=32),
}
SHARED = "its samples cannot be separated"
LEFT_OUT = {
    "gpt2": {"transformer.wpe.weight": SHARED},
    "gpt2, untied": {"transformer.wpe.weight": SHARED},
    "bert": {"bert.embeddings.position_embeddings.weight": SHARED},
}


def make(family):
    torch.manual_seed(0)
    kind = AutoModelForMaskedLM if family == "bert" else AutoModelForCausalLM
    return kind.from_config(CONFIGS[family]).eval()


def batch(samples=B):
    ids = torch.randint(1, 20, (B, T), generator=torch.Generator().manual_seed(0))[:samples]
    return {"input_ids": ids, "labels": ids}


def scan(model, inputs, **settings):
    with ParameterTensorScanner(model, **settings) as scanner:
        loss = model(**inputs).loss
        (loss * len(inputs["input_ids"])).backward()  # the sum of the samples' means
        (record,) = scanner.collect()
    return scanner, record


def true_gradients(model, names):
    """{name: (B, ...)} by plain autograd, one sample at a time."""
    found = []
    for ids in batch()["input_ids"].split(1):
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        weights = dict(model.named_parameters())
        found.append([weights[name].grad.clone() for name in names])
    return {name: torch.stack(rows) for name, rows in zip(names, zip(*found, strict=True), strict=True)}


def spoken(caplog):
    return [entry.message for entry in caplog.records if entry.name.startswith("instruments")]


def blocks(matrices_BOI, width, dim):
    return torch.stack([part.flatten(1).norm(dim=1) for part in matrices_BOI.split(width, dim)], dim=1)


def assert_exact(scanner, record, gradients):
    inputs = outputs = 0
    for column, parameter in enumerate(scanner.parameters):
        own = (
            slice(inputs, inputs := inputs + parameter.in_blocks),
            slice(outputs, outputs := outputs + parameter.out_blocks),
        )
        if parameter.name in scanner.left_out:
            assert record.gradient_BP[:, column].isnan().all()
            continue
        truth = gradients[parameter.name]
        if parameter.kind == "embedding" or ".h." in parameter.name:  # a Conv1D of gpt2
            truth = truth.mT
        expected = truth.flatten(1).norm(dim=1), blocks(truth, parameter.out_width, 1)
        torch.testing.assert_close(record.gradient_BP[:, column], expected[0], rtol=2e-5, atol=1e-9, msg=parameter.name)
        torch.testing.assert_close(record.out_gradient_BO[:, own[1]], expected[1], rtol=2e-5, atol=1e-9)
        if parameter.kind == "linear":
            found = record.in_gradient_BI[:, own[0]]
            torch.testing.assert_close(found, blocks(truth, parameter.in_width, 2), rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("family", CONFIGS)
def test_every_weight_by_default_and_exact(family, caplog):
    scanner, record = scan(make(family), batch(), block_width=5)
    model = make(family)
    weights = {name: weight for name, weight in model.named_parameters() if weight.ndim == 2}
    assert {parameter.name for parameter in scanner.parameters} == weights.keys()
    assert scanner.left_out == LEFT_OUT.get(family, {})
    said = [f"parameter scan: 1 weights are left out: {name} ({why})" for name, why in scanner.left_out.items()]
    assert spoken(caplog) == said
    assert_exact(scanner, record, true_gradients(model, list(weights)))


def test_positions_belong_to_a_single_sample():
    scanner, record = scan(make("gpt2"), batch(samples=1))
    assert scanner.left_out == {}
    gradients = true_gradients(make("gpt2"), [parameter.name for parameter in scanner.parameters])
    assert_exact(scanner, record, {name: rows[:1] for name, rows in gradients.items()})


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_a_tied_head_has_both_parts_or_is_refused(family):
    model = make(family)
    embedding = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    scanner, record = scan(model, batch(), patterns=[embedding])
    assert_exact(scanner, record, true_gradients(make(family), [f"{embedding}.weight"]))
    with pytest.raises(ConfigError, match=f"lm_head.weight: it shares its weight with {embedding}, "):
        ParameterTensorScanner(model, patterns=["lm_head"])
    ParameterTensorScanner(make("gpt2, untied"), patterns=["lm_head"])


@pytest.mark.parametrize("kernel", ["eager", "grouped_mm", "batched_mm", "grouped_mm of an old GPU"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_every_fused_expert(family, kernel, monkeypatch):
    if kernel.endswith("GPU"):
        monkeypatch.setattr("transformers.integrations.moe._can_use_grouped_mm", lambda *_: False)

    def build():
        torch.manual_seed(0)
        model = make_moe(family).eval()
        model.set_experts_implementation(kernel.split()[0])
        return model

    scanner, record = scan(build(), batch())
    model, gradients = build(), {}
    fused = {n: g for n, g in true_gradients(model, [n for n, w in model.named_parameters() if w.ndim >= 2]).items()}
    for name, rows in fused.items():
        if rows.ndim == 4:
            module, own = name.rsplit(".", 1)
            gradients |= {f"{module}.{expert}.{own}": rows[:, expert] for expert in range(rows.shape[1])}
    experts = [parameter.name for parameter in scanner.parameters if ".experts." in parameter.name]
    assert len(experts) == 2 * 5 * 2
    assert set(experts) == set(gradients)
    assert_exact(scanner, record, fused | gradients)
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in scanner.left_out} <= {"gate", "router"}
    for name, why in scanner.left_out.items():
        assert why.endswith("is no Linear, Conv1D or embedding"), name


def test_experts_that_get_some_of_the_tokens_are_left_out():
    """The experts get 4 tokens only, as in a layer that removes padding; the other output rows are zero."""
    model = make_moe("qwen3_moe").eval()
    experts = model.model.layers[0].mlp.experts
    experts.register_forward_pre_hook(lambda _module, args: tuple(one[:4] for one in args))
    experts.register_forward_hook(lambda _module, _args, output: nn.functional.pad(output, (0, 0, 0, B * T - 4)))
    scanner, record = scan(model, batch())
    first = {p.name: column for column, p in enumerate(scanner.parameters) if "layers.0.mlp.experts" in p.name}
    assert list(scanner.left_out.values()).count(SHARED) == 2
    assert record.gradient_BP[:, list(first.values())].isnan().all()


def test_experts_that_two_layers_share_are_left_out():
    """They run twice in one forward pass: the norms of all experts, not only of the first, would be wrong."""
    model = make_moe("qwen3_moe").eval()
    model.model.layers[1].mlp.experts = model.model.layers[0].mlp.experts
    scanner, record = scan(model, batch())
    assert list(scanner.left_out.values()).count("it ran twice in one forward pass") == 2
    experts = [column for column, one in enumerate(scanner.parameters) if ".experts." in one.name]
    assert record.activation_BP[:, experts].isnan().all()
    assert record.gradient_BP[:, experts].isnan().all()


def test_experts_without_gradients():
    model = make_moe("qwen3_moe").eval()
    _, expected = scan(model, batch())
    with ParameterTensorScanner(model, gradients=False) as scanner, torch.no_grad():
        model(input_ids=batch()["input_ids"])
        (record,) = scanner.collect()
    torch.testing.assert_close(record.activation_BP, expected.activation_BP)
    assert record.gradient_BP.isnan().all()


def test_blocks_of_attention_are_heads():
    widths = {}
    for family in ("gpt2", "bert", "phi", "gemma2"):
        for parameter in ParameterTensorScanner(make(family), block_width=5).parameters:
            widths[family, parameter.name.removesuffix(".weight")] = (parameter.in_width, parameter.out_width)
    outward, inward, plain = (5, 8), (8, 5), (5, 5)
    assert widths["gpt2", "transformer.h.0.attn.c_attn"] == outward
    assert widths["gpt2", "transformer.h.0.attn.c_proj"] == inward
    assert widths["bert", "bert.encoder.layer.1.attention.self.value"] == outward
    assert widths["bert", "bert.encoder.layer.1.attention.output.dense"] == inward
    assert widths["phi", "model.layers.0.self_attn.k_proj"] == outward
    assert widths["phi", "model.layers.0.self_attn.dense"] == inward
    assert widths["gemma2", "model.layers.0.self_attn.o_proj"] == inward
    ffn = (
        ("gpt2", "transformer.h.0.mlp.c_proj"),
        ("bert", "bert.encoder.layer.1.output.dense"),
        ("phi", "model.layers.0.mlp.fc1"),
    )
    assert {widths[name] for name in ffn} == {plain}


def test_what_is_left_out_is_said_in_one_line(caplog):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.once, self.twice = nn.Conv1d(6, 6, 1), nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, inputs_embeds):
            return self.once(self.twice(self.twice(self.conv(inputs_embeds.mT).mT)))

    model = Mixed()
    with ParameterTensorScanner(model) as scanner:
        for _ in range(2):
            model(torch.randn(B, T, 6)).square().sum().backward()
        records = scanner.collect()
    assert spoken(caplog) == [
        "parameter scan: 1 weights are left out: conv.weight (Conv1d is no Linear, Conv1D or embedding)",
        "parameter scan: 1 weights are left out: twice.weight (it ran twice in one forward pass)",
    ]
    for record in records:
        assert (record.gradient_BP[:, 0] > 0).all()
        assert record.gradient_BP[:, 1].isnan().all()
        assert record.activation_BP[:, 1].isnan().all()
