"""Layers of every kind in a dump: tensors equal autograd's, and missing layers are reported."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertConfig, Gemma2Config, GPT2Config, PhiConfig

from instruments.errors import ConfigError
from instruments.tensor_dump.command import main
from instruments.tensor_dump.config import DumpConfig
from instruments.tensor_dump.reader import DumpReader
from instruments.tensor_dump.tensor_dump import TensorDump

B, T, V, D = 2, 7, 61, 24
SIZES = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
EVERYTHING = ["input", "weight", "output", "grad_output"]
CONFIGS = {
    "gpt2": GPT2Config(vocab_size=V, n_embd=D, n_layer=2, n_head=4, n_positions=32),
    "bert": BertConfig(**SIZES, max_position_embeddings=32),
    "phi": PhiConfig(**SIZES | {"hidden_size": 32}, max_position_embeddings=32),
    "gemma2": Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=6, max_position_embeddings=32),
}


def make(family):
    torch.manual_seed(0)
    kind = AutoModelForMaskedLM if family == "bert" else AutoModelForCausalLM
    return kind.from_config(CONFIGS[family]).eval()


def batch(seed=0):
    ids = torch.randint(1, V, (B, T), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def dump_steps(model, folder, passes, **settings):
    with TensorDump(model, folder, DumpConfig(**settings), environment={}) as dump:
        for inputs in passes:
            model(**inputs).loss.backward()
            dump.step()
    return dump.manifest


@pytest.mark.parametrize("family", CONFIGS)
def test_every_weight_matrix_is_dumped(family, tmp_path):
    model, plain = make(family), make(family)
    manifest = dump_steps(model, tmp_path / "dump", [batch()], tensors=EVERYTHING)
    assert list(manifest.complaints()) == []
    plain(**batch()).loss.backward()
    matrices = {name for name, weight in plain.named_parameters(remove_duplicate=False) if weight.ndim >= 2}
    with DumpReader(tmp_path / "dump") as reader:
        for tensor in EVERYTHING[1:]:
            found = {
                f"{one.source.module}.weight"
                for one in reader.select(tensor=tensor, layer_type={"linear", "embedding"})
            }
            assert found == matrices, tensor
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
        assert not ours._backward_hooks


def test_the_output_of_attention(tmp_path):
    model, seen = make("phi"), []
    model.model.layers[0].self_attn.dense.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    dump_steps(model, tmp_path / "dump", [batch()], modules=["*self_attn"], tensors=["output"])
    with DumpReader(tmp_path / "dump") as reader:
        record, _ = reader.records
        assert torch.equal(reader.load(record).flatten(2), seen[0])


def test_convolutions(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.up = nn.Conv2d(3, 5, 3), nn.ConvTranspose1d(5, 4, 2)

        def forward(self, x):
            return self.up(self.first(x).flatten(2)).square().mean()

    torch.manual_seed(0)
    model, x = Net(), torch.randn(B, 3, 8, 7)
    with TensorDump(model, tmp_path / "dump", DumpConfig(tensors=EVERYTHING, max_tokens=2), environment={}) as dump:
        model(x).backward()
        dump.step()
    assert list(dump.manifest.complaints()) == []
    with DumpReader(tmp_path / "dump") as reader:
        assert {record.source.layer_type for record in reader.records} == {"convolution"}
        assert torch.equal(reader.load(reader.select(module="first", tensor="input")[0]), x)  # no token axis to cut
        assert [record.source.module for record in reader.select(tensor="grad_output")] == ["up", "first"]


@pytest.mark.parametrize("how", ["model", "part", "in place"])
def test_a_compiled_model_is_refused_before_the_first_step(how, tmp_path):
    model = make("gpt2")
    if how == "model":
        model = torch.compile(model, backend="eager")
    elif how == "part":
        model.transformer.h[1] = torch.compile(model.transformer.h[1], backend="eager")
    else:
        model.compile(backend="eager")
    with pytest.raises(ConfigError, match="the model is compiled"):
        TensorDump(model, tmp_path / "dump", environment={}).__enter__()
    assert not (tmp_path / "dump").exists()


@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_a_model_compiled_later_is_refused_in_its_first_pass(tmp_path):
    model = make("gpt2")
    with TensorDump(model, tmp_path / "dump", environment={}):
        model(**batch())
        with pytest.raises(ConfigError, match="the model is compiled"):
            torch.compile(model, backend="eager")(**batch(1))


def test_torch_compile_that_does_nothing_is_no_obstacle(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    model = torch.compile(make("gpt2"))
    model.compile()
    assert list(dump_steps(model, tmp_path / "dump", [batch()]).complaints()) == []


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, nullcontext])
def test_evaluation_is_marked_and_no_microbatch(context, tmp_path):
    model = make("gpt2")
    with TensorDump(model, tmp_path / "dump", DumpConfig(tensors=["input"]), environment={}) as dump:
        model(**batch(0)).loss.backward()
        with context():
            model(**batch(1))
        model(**batch(2)).loss.backward()
        dump.step()
    with DumpReader(tmp_path / "dump") as reader:
        records = reader.select(module="transformer.wte")
        found = [(record.source.microbatch, record.source.evaluation) for record in records]
        trained = [(0, False), (1, False), (2, False)]
        assert found == (trained if context is nullcontext else [(0, False), (0, True), (1, False)])
        for seed, record in enumerate(records):
            assert torch.equal(reader.load(record), batch(seed)["input_ids"])


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_wrapped_model_has_the_names_of_the_plain_one(tmp_path, capsys, process_group):
    dump_steps(make("gpt2"), tmp_path / "plain", [batch()])
    wrapped = DistributedDataParallel(make("gpt2"), find_unused_parameters=True)
    dump_steps(wrapped, tmp_path / "wrapped", [batch()], modules=["transformer.*", "lm_head"])
    assert main(["compare", str(tmp_path / "plain"), str(tmp_path / "wrapped")]) == 0
    assert "only in" not in capsys.readouterr().out


def test_names_inside_of_a_wrapped_part(tmp_path):
    class Wrapped(nn.Module):  # the attribute's name in FullyShardedDataParallel and checkpoint_wrapper
        def __init__(self, part):
            super().__init__()
            self._checkpoint_wrapped_module = part

        def forward(self, *args, **kwargs):
            return self._checkpoint_wrapped_module(*args, **kwargs)

    model = make("gpt2")
    model.transformer.h[0].mlp = Wrapped(model.transformer.h[0].mlp)
    manifest = dump_steps(model, tmp_path / "dump", [batch()], modules=["transformer.h.0.mlp.c_fc"])
    assert list(manifest.captured) == ["transformer.h.0.mlp.c_fc"]


# Stand-ins with the interface of TransformerEngine's modules, which cannot be installed without a GPU.
class _Stand(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / 4)
        self.parallel_mode, self.tp_size, self.sequence_parallel, self.tp_group = None, 1, False, None


class Linear(_Stand):
    def forward(self, inp, is_first_microbatch=None, fp8_output=False):
        return nn.functional.linear(inp, self.weight), None  # output and bias, as Megatron expects


class LayerNormLinear(_Stand):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.layer_norm_weight = nn.Parameter(torch.ones(inputs))

    def forward(self, inp, is_first_microbatch=None):
        return nn.functional.linear(nn.functional.layer_norm(inp, inp.shape[-1:], self.layer_norm_weight), self.weight)


class DotProductAttention(nn.Module):
    qkv_format = "sbhd"

    def forward(self, query_layer, key_layer, value_layer, attention_mask=None):
        scores = torch.einsum("sbhd,tbhd->bhst", query_layer, key_layer).softmax(-1)
        return torch.einsum("bhst,tbhd->sbhd", scores, value_layer).flatten(2)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.attention, self.proj = LayerNormLinear(D, 3 * D), DotProductAttention(), Linear(D, D)

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, 6)).unbind(2)
        return self.proj(inp=self.attention(query, key, value_layer=value))[0]


def run_layer(folder):
    torch.manual_seed(0)
    model, x = nn.Sequential(Layer(), Layer()), torch.randn(T, B, D)
    # All weight gradients but that of 1.qkv, which has no buffer, are deferred or not computed.
    for layer, buffer in zip(model, ([], None), strict=True):
        layer.qkv.config = SimpleNamespace(defer_embedding_wgrad_compute=True)
        layer.qkv.grad_output_buffer = buffer
    model[0].proj.wgrad_store = SimpleNamespace(delay_wgrad_compute=lambda: True)
    model[1].proj.weight.requires_grad_(False)
    settings = DumpConfig(tensors=[*EVERYTHING, "query", "key", "value", "grad_value"])
    with TensorDump(model, folder, settings, environment={}) as dump:
        model(x).square().sum().backward()
        dump.step()
    return x, dump.manifest


def test_transformer_engine_is_known_by_name(tmp_path, monkeypatch):
    for kind in (Linear, LayerNormLinear, DotProductAttention):
        monkeypatch.setattr(kind, "__module__", "transformer_engine.pytorch.module")
    x, manifest = run_layer(tmp_path / "dump")
    assert list(manifest.complaints()) == []
    with DumpReader(tmp_path / "dump") as reader:
        kinds = {(record.source.module, record.source.layer_type, record.source.layer) for record in reader.records}
        assert kinds == {
            (f"{layer}.{name}", kind, layer)
            for layer in (0, 1)
            for name, kind in (("qkv", "layernorm_linear"), ("attention", "attention"), ("proj", "linear"))
        }
        (first,) = reader.select(module="0.qkv", tensor="input")
        assert torch.equal(reader.load(first), x)
        (output,), (given,) = (
            reader.select(module="1.attention", tensor="output"),
            reader.select(module="1.proj", tensor="input"),
        )
        assert torch.equal(reader.load(output), reader.load(given))
        assert reader.select(module="1.attention", tensor="grad_value")[0].shape == (T, B, 4, 6)
        computed = {one.source.module for one in reader.records if one.metadata.get("wgrad_compute")}
        assert computed == {"1.qkv"}
        assert given.metadata == {
            "sequence_parallel": False,
            "use_bias": False,
            "tp_group_size": None,
            "wgrad_compute": False,
        }
        assert all(record.name.count("_") == 6 + record.source.tensor.count("_") for record in reader.records)


def test_modules_of_the_same_names_elsewhere_are_not_taken_for_them(tmp_path):
    with pytest.raises(ConfigError, match="the model has no layer and no attention known here"):
        run_layer(tmp_path / "dump")
