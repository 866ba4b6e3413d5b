"""A dump of megatron-core in one process, and in two with tensor parallelism over gloo."""

import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from integration.forked import run_ranks
from megatron_sizes import GROUPS, HEADS, B, D, F, L, T, V

from instruments.tensor_dump.config import DumpConfig
from instruments.tensor_dump.reader import DumpReader
from instruments.tensor_dump.tensor_dump import TensorDump

REPOSITORY = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core has no wheel for this Python"),
    # megatron-core's own warnings
    pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*set the environment variable CUDA_DEVICE_MAX_CONNECTIONS:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.* is deprecated:FutureWarning"),
]
ATTENTION = ("query", "key", "value")
CASES = {
    "plain": {},
    "recompute": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def run_plainly():
    """Run one process with plain hooks; return {(step, module, tensor): value}, losses and gradients."""
    from megatron_on_cpu import make_batches, make_gpt

    model, found, kept, losses = make_gpt(), {}, [], []
    names = {module: name for name, module in model.named_modules()}

    def keep(step, module, name, tensor):
        tensor.retain_grad()
        kept.append((step, names[module], name, tensor))

    def on_linear(module, args, kwargs, output):
        found[step, names[module], "input"] = args[0].detach().clone()
        found[step, names[module], "weight"] = module.weight.detach().clone()
        keep(step, module, "grad_output", output if isinstance(output, torch.Tensor) else output[0])

    def on_attention(module, args, kwargs):
        for name, tensor in zip(ATTENTION, args, strict=False):
            found[step, names[module], name] = tensor.detach().clone()
            keep(step, module, f"grad_{name}", tensor)

    for module, name in names.items():
        if name.endswith("core_attention"):
            module.register_forward_pre_hook(on_attention, with_kwargs=True)
        elif "linear_" in name or name == "output_layer" or name.endswith("_embeddings"):
            module.register_forward_hook(on_linear, with_kwargs=True)
    for step, batch in enumerate(make_batches()):  # noqa: B007 - which step it is, for the hooks
        loss = model(**batch).mean()
        loss.backward()
        losses.append(loss.detach())
    found |= {(step, module, name): tensor.grad.clone() for step, module, name, tensor in kept}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return found, torch.stack(losses), gradients


@pytest.mark.slow
def test_megatrons_own_loop_is_dumped_by_the_environment_alone(tmp_path):
    """Megatron's schedule with two microbatches per step, in a script that does not change."""
    script, found = Path(__file__).with_name("megatron_loop.py"), {}
    paths = ":".join([str(REPOSITORY), str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")])
    for enabled in ("", "1"):
        settings = {"TENSOR_SAVE_ENABLED": enabled, "TENSOR_SAVE_DIR": str(tmp_path / "dump"), "PYTHONPATH": paths}
        words = [sys.executable, script, tmp_path / f"store{enabled}"]
        done = subprocess.run(words, env=os.environ | settings, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found[enabled] = done.stdout
    assert found[""] == found["1"]
    with DumpReader(tmp_path / "dump") as reader:
        records = reader.select(module="decoder.layers.1.self_attention.core_attention", tensor="grad_query")
        passes = [(record.source.step, record.source.microbatch) for record in records]
        assert sorted(passes) == [(step, microbatch) for step in (0, 1) for microbatch in (0, 1)]
        assert {record.source.layer for record in records} == {1}
        assert list(reader.manifests()[0].complaints()) == []


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    from megatron_on_cpu import megatron_group

    folder = tmp_path_factory.mktemp("store")

    def run(_rank):
        with megatron_group(store=folder / "store"):
            torch.save(run_plainly(), folder / "run.pt")

    run_ranks(1, run)  # gloo's threads do not survive a fork, so this process must have no group
    return torch.load(folder / "run.pt", weights_only=True)  # noqa: TID251 - a file this test wrote


def dump(folder, rank, world, case):
    """Run one process of a case, with a dump."""
    from megatron_on_cpu import make_batches, make_gpt, megatron_group

    with megatron_group(rank, world, folder / "store"):
        model, losses = make_gpt(world, **CASES[case]), []
        with TensorDump(model, folder / "dump", DumpConfig()) as dumped:
            for batch in make_batches():
                loss = model(**batch).mean()
                loss.backward()
                losses.append(loss.detach())
                dumped.step(loss)
        complaints = list(dumped.manifest.complaints())
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert complaints == [], complaints
    torch.save({"losses": torch.stack(losses), "gradients": gradients}, folder / f"run-{rank}.pt")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Run a case once in `world` new processes; return its folder."""

    @cache
    def start(world, case):
        folder = tmp_path_factory.mktemp(f"{case}{world}")
        run_ranks(world, lambda rank: dump(folder, rank, world, case))
        return folder

    return start


@pytest.mark.parametrize("case", CASES)
def test_one_process_gives_what_plain_hooks_give(plain, job, case):
    expected, losses, gradients = plain
    folder = job(1, case)
    with DumpReader(folder / "dump") as reader:
        found = {(r.source.step, r.source.module, r.source.tensor): reader.load(r) for r in reader.records}
        assert len(found) == len(reader.records)
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    run = torch.load(folder / "run-0.pt", weights_only=True)  # noqa: TID251 - a file this test wrote
    assert torch.equal(run["losses"], losses)
    assert [name for name in gradients if not torch.equal(run["gradients"][name], gradients[name])] == []


@pytest.mark.parametrize("case", CASES)
def test_weight_gradients_follow_from_inputs_and_output_gradients(job, case):
    folder = job(2, case)
    with DumpReader(folder / "dump") as reader:
        for rank in range(2):
            run = torch.load(folder / f"run-{rank}.pt", weights_only=True)  # noqa: TID251 - a file this test wrote
            names = {record.source.module for record in reader.select(layer_type="linear", rank=rank)}
            assert len(names) == 4 * L + 1
            for name in names:
                gradient, rebuilt = run["gradients"][f"{name}.weight"], 0
                for one in reader.select(module=name, tensor="grad_output", rank=rank):
                    (other,) = reader.select(module=name, tensor="input", rank=rank, step=one.source.step)
                    rebuilt = rebuilt + reader.load(one).flatten(0, 1).T @ reader.load(other).flatten(0, 1)
                assert torch.equal(rebuilt, gradient), (rank, name)


def test_each_process_holds_its_own_part(job):
    with DumpReader(job(2, "plain") / "dump") as reader:
        for rank in range(2):
            mine = {(r.source.module, r.source.tensor): r for r in reader.select(rank=rank, step=1)}
            qkv = mine["decoder.layers.1.self_attention.linear_qkv", "weight"]
            assert qkv.shape == ((D + 2 * D * GROUPS // HEADS) // 2, D)
            assert qkv.parallel["tp"] == (rank, 2)
            fc2 = mine["decoder.layers.1.mlp.linear_fc2", "input"]
            assert fc2.shape == (T, B, F // 2)
            query = mine["decoder.layers.1.self_attention.core_attention", "query"]
            assert query.shape == (T, B, HEADS // 2, D // HEADS)
            assert mine["output_layer", "grad_output"].shape == (T, B, V // 2)
        layers = {record.source.layer for record in reader.select(module="decoder.*")}
        assert layers == set(range(L))
        names = [record.name for record in reader.records]
        assert len(set(names)) == len(names)


def test_records_name_the_mask_and_how_a_layer_is_parallel(job):
    with DumpReader(job(2, "plain") / "dump") as reader:
        (query,) = reader.select(module="*.1.self_attention.core_attention", tensor="query", step=1, rank=1)
        assert query.metadata == {"attention_mask_shape": [1, 1, T, T], "attn_mask_type": "causal"}
        (weight,) = reader.select(module="*.1.mlp.linear_fc1", tensor="weight", step=1, rank=1)
        facts = {"sequence_parallel": False, "use_bias": False, "tp_group_size": 2, "wgrad_compute": True}
        assert (weight.metadata, weight.is_leaf) == (facts, True)
        (given,) = reader.select(module="*.1.mlp.linear_fc1", tensor="input", step=1, rank=1)
        assert given.is_leaf is False


def test_parts_are_those_of_one_process(plain, job):
    expected, losses, _ = plain
    run = torch.load(job(2, "plain") / "run-0.pt", weights_only=True)  # noqa: TID251 - a file this test wrote
    torch.testing.assert_close(run["losses"], losses, rtol=1e-6, atol=0)
    axes = {"linear_proj": 1, "linear_fc2": 1, "word_embeddings": 0, "output_layer": 0}
    with DumpReader(job(2, "plain") / "dump") as reader:
        for name, axis in axes.items():
            parts = [reader.select(module=f"*{name}", tensor="weight", step=1, rank=rank)[0] for rank in (0, 1)]
            whole, module = torch.cat([reader.load(part) for part in parts], axis), parts[0].source.module
            assert torch.equal(whole, expected[1, module, "weight"]), module
