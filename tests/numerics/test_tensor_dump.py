"""A dump of a transformers model equals plain hooks and autograd bit for bit and changes no result."""

from contextlib import ExitStack

import pytest
import torch
from numerics.plain_hooks import registered, run_plainly
from pico import write_pico
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from instruments.tensor_dump.config import DumpConfig
from instruments.tensor_dump.reader import DumpReader
from instruments.tensor_dump.tensor_dump import TensorDump
from models.config import ModelConfig
from models.loading import load_dense
from stages.losses import enable_gradient_checkpointing

B, T = 2, 7


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pico")
    return {family: write_pico(folder / family, family) for family in ("qwen3", "llama", "qwen2", "phi3")}


@pytest.fixture
def load(folders):
    def load(family="qwen3", attention="sdpa"):
        model = AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.float32)
        model.config._attn_implementation = attention
        return model.train()

    return load


@pytest.fixture
def passes():
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(61, (2, B, T), generator=generator)
    mask = torch.ones(B, T, dtype=torch.long)
    mask[1, 5:] = 0
    return [{"input_ids": one, "attention_mask": mask, "labels": one} for one in ids]


@pytest.fixture
def read():
    """Open dumps and close them after the test."""
    with ExitStack() as opened:
        yield lambda folder: opened.enter_context(DumpReader(folder))


@pytest.fixture
def dump(tmp_path, read):
    """Dump passes, one per step; return the reader, the losses and the manifest."""

    def run(model, passes, **settings):
        losses = []
        with TensorDump(model, tmp_path / "dump", DumpConfig(**settings)) as dumped:
            for inputs in passes:
                loss = model(**inputs).loss
                loss.backward()
                losses.append(loss.detach())
                dumped.step(loss)
        return read(tmp_path / "dump"), torch.stack(losses), dumped.manifest

    return run


def contents(reader):
    found = {}
    for record in reader.records:
        source = record.source
        key = source.step, source.module, source.tensor
        assert key not in found, f"{key} is there twice"
        found[key] = reader.load(record)
    return found


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    unequal = [key for key, value in expected.items() if not torch.equal(found[key], value)]
    assert unequal == []


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", "phi3"])
def test_everything_is_what_plain_hooks_give(load, passes, family, attention, dump):
    expected, losses = run_plainly(load(family, attention), passes, attention)
    reader, dumped_losses, manifest = dump(load(family, attention), passes)
    assert_same(contents(reader), expected)
    assert torch.equal(dumped_losses, losses)
    assert (manifest.never_fired, manifest.missing, manifest.steps) == ([], {}, 2)


def test_a_kernel_registered_by_others_is_seen_like_those_of_transformers(load, passes, dump):
    expected, _ = run_plainly(load(), passes)
    with registered("house_flash", sdpa_attention_forward, like="sdpa"):
        reader, _, _ = dump(load(attention="house_flash"), passes)
    assert_same(contents(reader), expected)


def test_nothing_the_model_computes_changes_and_nothing_is_left_behind(load, passes, dump):
    plain, dumped = load(), load()
    untouched = AttentionInterface.__dict__["get_interface"]
    for inputs in passes:
        plain(**inputs).loss.backward()
    dump(dumped, passes)
    for (name, parameter), other in zip(plain.named_parameters(), dumped.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad), name
    assert AttentionInterface.__dict__["get_interface"] is untouched
    hooks = [module for module in dumped.modules() if module._forward_hooks or module._forward_pre_hooks]
    assert hooks == []


def test_two_models_are_dumped_at_a_time_and_end_in_any_order(load, passes, tmp_path, read):
    untouched = AttentionInterface.__dict__["get_interface"]
    models = [load("qwen3"), load("llama")]
    dumps = [TensorDump(model, tmp_path / str(number)) for number, model in enumerate(models)]
    for one in dumps:
        one.__enter__()
    for model in models:
        model(**passes[0]).loss.backward()
    for one in dumps:  # in the order of opening, not reversed
        one.__exit__(None, None, None)
    assert AttentionInterface.__dict__["get_interface"] is untouched
    for number, family in enumerate(("qwen3", "llama")):
        expected, _ = run_plainly(load(family), passes[:1])
        assert_same(contents(read(tmp_path / str(number))), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_are_dumped_once(load, passes, reentrant, dump):
    expected, losses = run_plainly(load(), passes)
    model = load()
    enable_gradient_checkpointing(model, reentrant=reentrant)
    model.enable_input_require_grads()
    reader, dumped_losses, manifest = dump(model, passes)
    assert_same(contents(reader), expected)
    assert torch.equal(dumped_losses, losses)
    assert manifest.missing == {}


def test_frozen_weights_change_nothing(load, passes, dump):
    expected, _ = run_plainly(load(), passes)
    model = load()
    model.requires_grad_(False)
    model.get_input_embeddings().weight.requires_grad_(True)
    reader, *_ = dump(model, passes)
    assert_same(contents(reader), expected)
    assert {record.requires_grad for record in reader.select(tensor="weight", layer_type="linear")} == {False}


def test_shared_tensors_are_stored_once(load, passes, dump):
    reader, *_ = dump(load(), passes[:1])
    layer = "model.layers.0"
    for names in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        records = [reader.select(module=f"{layer}.{name}", tensor="input")[0] for name in names]
        assert len({(record.file, record.key) for record in records}) == 1
        assert len({record.name for record in records}) == len(names)


def test_a_tensor_changed_in_between_is_stored_again(tmp_path, read):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 5), nn.Linear(6, 4)

        def forward(self, x):
            left = self.first(x)
            x.mul_(2)
            return left.sum() + self.second(x).sum()

    model, x = Twice(), torch.randn(3, 6)
    before = x.clone()
    with torch.no_grad(), TensorDump(model, tmp_path / "dump", DumpConfig(tensors=["input"])):
        model(x)
    reader = read(tmp_path / "dump")
    first, second = (reader.load(record) for record in reader.records)
    assert torch.equal(first, before)
    assert torch.equal(second, before * 2)


@pytest.mark.parametrize("recomputed", [False, True])
def test_microbatches_of_one_step_are_told_apart(recomputed, load, passes, tmp_path, read):
    model = load()
    if recomputed:
        enable_gradient_checkpointing(model, reentrant=True)
        model.enable_input_require_grads()
    with TensorDump(model, tmp_path / "dump", DumpConfig(tensors=["input", "weight", "grad_output"])) as dumped:
        losses = [model(**inputs).loss for inputs in passes]
        for loss in losses:  # as in pipeline parallelism, after later forward passes
            loss.backward()
        dumped.step()
    expected, _ = run_plainly(load(), passes)
    reader = read(tmp_path / "dump")
    for record in reader.records:
        source = record.source
        assert source.step == 0
        assert torch.equal(reader.load(record), expected[source.microbatch, source.module, source.tensor])
    weights = reader.select(tensor="weight", module="lm_head")
    assert len(weights) == 2
    assert len({record.key for record in weights}) == 1


def test_autocast_is_recorded_beside_the_real_format(load, passes, tmp_path, read):
    model = load()
    with TensorDump(model, tmp_path / "dump", DumpConfig(tensors=["input", "query"], modules=["*layers.1*"])) as dumped:
        with torch.autocast("cpu", torch.bfloat16):
            model(**passes[0]).loss.backward()
        dumped.step()
    reader = read(tmp_path / "dump")
    assert {(record.quant_type, record.autocast) for record in reader.select(module="*.q_proj")} == {("fp32", "bf16")}


@pytest.mark.parametrize(("quantization", "stored"), [("nf4", torch.uint8), ("fp4", torch.uint8), ("int8", torch.int8)])
def test_packed_weights_are_called_what_they_are(tmp_path, read, quantization, stored):
    folder = write_pico(tmp_path / "pico", "qwen3", hidden=64, intermediate=64)
    model = load_dense(ModelConfig(kind="local", path=str(folder), device="cpu", quantization=quantization), folder)
    with TensorDump(model, tmp_path / "dump", DumpConfig(tensors=["input", "weight"], quant_type="mxfp8")) as dumped:
        model(input_ids=torch.arange(5)[None])
        dumped.step()
    reader = read(tmp_path / "dump")
    records = reader.select(module="model.layers.*", tensor="weight")
    assert records
    for record in records:
        assert (record.quant_type, record.label) == (quantization, "mxfp8")
        assert reader.load(record).dtype == stored


@pytest.mark.gpu
def test_on_a_gpu_everything_is_what_plain_hooks_give(load, passes, dump):
    """Copies overlap with kernels and use pinned memory that is too small for a step."""
    moved = [{name: tensor.cuda() for name, tensor in inputs.items()} for inputs in passes]
    expected, losses = run_plainly(load().cuda(), moved)
    reader, dumped_losses, _ = dump(load().cuda(), moved, memory_mib=1)
    assert_same(contents(reader), {key: value.cpu() for key, value in expected.items()})
    assert torch.equal(dumped_losses, losses)
    assert {record.device for record in reader.records} == {"cuda:0"}
